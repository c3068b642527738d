# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Which windows of which rasters: drawn by number, or in a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infsa_seg.raster import RasterReader, Window

from .transforms import LabelTable

Size = tuple[int, int]

# Of one mask: pixels that are looked at, and that are kept of each class.
_INDEXED_PIXELS = 2**24
_KEPT_PIXELS = 1024
# Decoded at once, beside the row of blocks that the reader keeps.
_STRIP_PIXELS = 2**22


class GridWindows:
    """Windows side by side, row by row; the last ones moved inside.

    Args:
        sizes (sequence): (height, width) of each raster.
        window (tuple[int, int]): Height and width; less where a raster is.
        stride (tuple[int, int]): Rows and columns from one to the next.
    """

    def __init__(
        self, sizes: Sequence[Size], window: Size, stride: Size
    ) -> None:
        self.sizes, self.window, self.stride = sizes, window, stride
        counts = [math.prod(self._counts(size)) for size in sizes]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[int, Window]:
        """The number of a raster, and the window in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        raster = int(np.searchsorted(self._ends, index, 'right'))
        before = int(self._ends[raster - 1]) if raster else 0
        size = self.sizes[raster]
        down, across = divmod(index - before, self._counts(size)[1])
        height, width = fit(self.window, size)
        return raster, Window(
            min(down * self.stride[0], size[0] - height),
            min(across * self.stride[1], size[1] - width),
            height,
            width,
        )

    def _counts(self, size: Size) -> Size:
        """Windows down and across a raster."""
        down, across = (
            math.ceil(max(side - part, 0) / step) + 1
            for side, part, step in zip(
                size, self.window, self.stride, strict=True
            )
        )
        return down, across


class RandomWindows:
    """Every window of every raster is as likely as any other, nearly.

    A raster is drawn by its area, then a place in it, up to the borders.

    Args:
        sizes (sequence): (height, width) of each raster.
        window (tuple[int, int]): Height and width; less where a raster is.
    """

    def __init__(self, sizes: Sequence[Size], window: Size) -> None:
        self.sizes, self.window = sizes, window
        self._areas = np.cumsum([float(h * w) for h, w in sizes])

    def draw(
        self, rng: np.random.Generator, count: int
    ) -> tuple[int, list[Window]]:
        """The number of a raster, and ``count`` windows in it."""
        raster = _draw(self._areas, rng)
        size = self.sizes[raster]
        part = fit(self.window, size)
        places = rng.integers(np.subtract(size, part) + 1, size=(count, 2))
        return raster, [
            Window(row, col, *part) for row, col in places.tolist()
        ]


class ClassPixels(NamedTuple):
    """Some pixels of a class in a mask.

    Args:
        total: How many there are in the whole mask, about.
        places: Rows and columns, int32 (pixels, 2), drawn evenly.
    """

    total: float
    places: np.ndarray


class BalancedWindows:
    """Windows about a pixel of a class, each class as likely as any other.

    A class is drawn among those that occur; then one of its pixels, each as
    likely as any other, at any place in the middle half of the window, or
    nearer to a side if the window would leave the raster.

    Args:
        sizes (sequence): (height, width) of each raster.
        window (tuple[int, int]): Height and width; less where a raster is.
        pixels (sequence): Of each raster the pixels of the classes that
            occur in it, by :func:`find_classes`.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        window: Size,
        pixels: Sequence[dict[int, ClassPixels]],
    ) -> None:
        self.sizes, self.window, self.pixels = sizes, window, pixels
        self.classes = sorted(set().union(*pixels))
        self._counts = {
            index: np.cumsum(
                [p[index].total if index in p else 0.0 for p in pixels]
            )
            for index in self.classes
        }

    def draw(
        self, rng: np.random.Generator, count: int
    ) -> tuple[int, list[Window]]:
        """The number of a raster, and ``count`` windows in it."""
        index = self.classes[rng.integers(len(self.classes))]
        raster = _draw(self._counts[index], rng)
        size = self.sizes[raster]
        part = np.array(fit(self.window, size))
        places = self.pixels[raster][index].places
        chosen = places[rng.integers(len(places), size=count)]
        shift = rng.integers(part // 4, part - part // 4, size=(count, 2))
        corners = np.clip(chosen - shift, 0, np.subtract(size, part))
        return raster, [
            Window(row, col, *part.tolist()) for row, col in corners.tolist()
        ]


def find_classes(
    mask: RasterReader, labels: LabelTable, path: str, seed: int
) -> dict[int, ClassPixels]:
    """Find pixels of each class that occurs in a mask.

    The mask is decoded once, from top to bottom. Of a large one every n-th
    row and column is looked at, 2^24 pixels in all.

    Args:
        mask (RasterReader): Class indices; opened with ``indexed``.
        labels (LabelTable): What its values mean.
        path (str): Its file, for the error.
        seed (int): Of the draws of the pixels that are kept.

    Returns:
        dict[int, ClassPixels]: By class index, without what is ignored.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or has values that mean nothing.
    """
    meta = mask.meta
    # Levels of a pyramid may be averages, of classes that are not there.
    step = math.ceil(math.sqrt(meta.height * meta.width / _INDEXED_PIXELS))
    rng = np.random.default_rng(seed)
    counts: dict[int, int] = {}
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for window in _strips(meta.height, meta.width, meta.block_rows):
        skipped = -window.row % step
        if skipped >= window.height:
            continue
        values = mask.read(window)[skipped::step, ::step, 0]
        found = labels.indices(values, path, meta.nodata)
        first = window.row + skipped
        flat = found.ravel()
        # Stable, and of small integers: a radix sort.
        order = np.argsort(flat, kind='stable')
        indices, starts = np.unique(flat[order], return_index=True)
        for index, part in zip(
            indices.tolist(), np.split(order, starts[1:]), strict=True
        ):
            if index == labels.ignore_index:
                continue
            counts[index] = counts.get(index, 0) + len(part)
            rows, cols = np.divmod(part, found.shape[1])
            places = np.stack([rows * step + first, cols * step], 1)
            kept[index] = _keep(kept.get(index), places, rng)
    return {
        index: ClassPixels(count * float(step**2), kept[index][1])
        for index, count in counts.items()
    }


def _keep(
    old: tuple[np.ndarray, np.ndarray] | None,
    places: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Keep an even draw of all places so far: those of the least numbers."""
    numbers, places = rng.random(len(places)), places.astype(np.int32)
    if old is not None:
        numbers = np.concatenate([old[0], numbers])
        places = np.concatenate([old[1], places])
    if len(numbers) > _KEPT_PIXELS:
        least = np.argpartition(numbers, _KEPT_PIXELS)[:_KEPT_PIXELS]
        numbers, places = numbers[least], places[least]
    return numbers, places


def _strips(height: int, width: int, block_rows: int) -> Iterator[Window]:
    blocks = max(_STRIP_PIXELS // (width * block_rows), 1)
    rows = blocks * block_rows
    for row in range(0, height, rows):
        yield Window(row, 0, min(rows, height - row), width)


def fit(window: Size, size: Size) -> Size:
    """The height and width of a window in a raster of this size."""
    return min(window[0], size[0]), min(window[1], size[1])


def _draw(sums: np.ndarray, rng: np.random.Generator) -> int:
    """Draw a number in proportion to weights of which these are the sums."""
    return int(np.searchsorted(sums, rng.random() * sums[-1], 'right'))
