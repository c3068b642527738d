# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster at another resolution."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .base import WrappedReader
from .window import Window

if TYPE_CHECKING:
    from .reader import RasterReader

# Bytes of the finer pixels that are read at once.
_STRIP_BYTES = 2**21
# Of a pixel's area, for it to be valid.
_LEAST_SHARE = 0.5


class ResampledReader(WrappedReader):
    """Reads a raster as if it had fewer pixels.

    A pixel is the mean of the area that it covers, from the coarsest level
    that has as many pixels or more; that of a level's own size is its pixel.
    Weights are ratios of integers: a window gives the same pixels whichever
    other windows are read. Pixels that are not valid have no weight, and a
    pixel is valid where half of its area is.

    Args:
        reader: Of the raster; closed together with this one.
        height: Rows in pixels.
        width: Columns in pixels.
        mpp: Micrometres per pixel of its full resolution, down and across, if
            they are not those that it says.

    Raises:
        ValueError: The raster has fewer pixels.
    """

    def __init__(
        self,
        reader: RasterReader,
        height: int,
        width: int,
        mpp: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(reader)
        meta = reader.meta
        finer = [
            level
            for level, size in enumerate(meta.level_sizes)
            if size[0] >= height and size[1] >= width
        ]
        if not finer or min(height, width) < 1:
            raise ValueError(
                f'{meta.height}x{meta.width} pixels cannot be read as '
                f'{height}x{width}'
            )
        self.level = finer[-1]
        self.size = meta.level_sizes[self.level]
        self.is_exact = self.size == (height, width)
        scale = self.size[0] / height
        place = meta.georeference
        if place is not None:
            place = place.resized(meta.height, meta.width, height, width)
        mpp = mpp or meta.mpp
        if mpp is not None:
            mpp = mpp[0] * meta.height / height, mpp[1] * meta.width / width
        self.meta = dataclasses.replace(
            meta,
            height=height,
            width=width,
            level_sizes=((height, width),),
            block_rows=max(round(meta.block_rows / scale), 1),
            nbytes_resident=meta.nbytes_resident
            + (0 if self.is_exact else self._held(height)),
            # Means of some pixels are none of its values.
            nodata=meta.nodata if self.is_exact else None,
            has_alpha=meta.has_alpha or not (self.is_exact or meta.all_valid),
            georeference=place,
            mpp=mpp,
        )

    def _held(self, height: int) -> int:
        """Bytes of finer pixels, and of what becomes of them."""
        meta = self.reader.meta
        rows = self.size[0] // height + 2
        row = self.size[1] * meta.channels * meta.dtype.itemsize
        return 20 * max(rows * row, _STRIP_BYTES)

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self.is_exact:
            pixels = self.reader.read(window, self.level)
            return pixels, self.reader.read_valid(window, self.level)
        shape = (window.height, window.width)
        pixels = np.empty((*shape, self.meta.channels), self.meta.dtype)
        valid = None if self.meta.all_valid else np.ones(shape, bool)
        for strip in self._strips(window):
            place = strip.within(window)
            pixels[place], shares = self._means(strip)
            if valid is not None and shares is not None:
                valid[place] = shares >= _LEAST_SHARE
        return pixels, valid

    def _load_valid(self, window: Window, level: int) -> np.ndarray | None:
        if self.is_exact:
            return self.reader.read_valid(window, self.level)
        valid = np.ones((window.height, window.width), bool)
        for strip in self._strips(window):
            down, across = self._axes(strip)
            source = Window(down.start, across.start, down.count, across.count)
            known = self.reader.read_valid(source, self.level)
            if known is not None:
                shares = across.mean(down.mean(known.astype(np.float32), 0), 1)
                valid[strip.within(window)] = shares >= _LEAST_SHARE
        return valid

    def _means(self, window: Window) -> tuple[np.ndarray, np.ndarray | None]:
        """Means over what is valid; how much of each pixel that is."""
        dtype = self.meta.dtype
        kind = np.float32 if dtype == np.uint8 else np.float64
        down, across = self._axes(window)
        source = Window(down.start, across.start, down.count, across.count)
        pixels = self.reader.read(source, self.level).astype(kind)
        valid = self.reader.read_valid(source, self.level)
        if valid is not None:
            pixels[~valid] = 0
        means = across.mean(down.mean(pixels, 0), 1)
        shares = None
        if valid is not None:
            shares = across.mean(down.mean(valid.astype(kind), 0), 1)
            means /= np.maximum(shares, _LEAST_SHARE)[..., None]
            means[shares < _LEAST_SHARE] = 0
        if dtype.kind in 'ui':
            limits = np.iinfo(dtype)
            means = np.rint(means).clip(limits.min, limits.max)
        return means.astype(dtype), shares

    def _strips(self, window: Window) -> list[Window]:
        """The window in parts whose finer pixels take little memory."""
        area = self.size[0] * self.size[1]
        share = area / (self.meta.height * self.meta.width)
        nbytes = share * window.width * self.meta.channels
        rows = max(int(_STRIP_BYTES / (nbytes * self.meta.dtype.itemsize)), 1)
        return [
            Window(row, window.col, rows, window.width).intersect(window)
            for row in range(window.row, window.row + window.height, rows)
        ]

    def _axes(self, window: Window) -> tuple[_Axis, _Axis]:
        return (
            _Axis(window.row, window.height, self.meta.height, self.size[0]),
            _Axis(window.col, window.width, self.meta.width, self.size[1]),
        )


class _Axis:
    """Along one side: which finer pixels a pixel covers, and how much.

    Args:
        start, count: Pixels that are wanted.
        few, many: Pixels of the whole side, and finer ones.
    """

    def __init__(self, start: int, count: int, few: int, many: int) -> None:
        wanted = np.arange(start, start + count)
        # In units of which a finer pixel has `few` and a wanted one `many`.
        low, high = wanted * many, (wanted + 1) * many
        first = low // few
        self.start = int(first[0])
        self.count = int(-(-high[-1] // few)) - self.start
        self._first = first - self.start
        last = (high - 1) // few
        self._weights = [
            (
                np.minimum((first + step + 1) * few, high)
                - np.maximum((first + step) * few, low)
            ).clip(0)
            / many
            for step in range(int((last - first).max()) + 1)
        ]

    def mean(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Weighted means of the finer values along an axis."""
        total = None
        shape = [1] * values.ndim
        shape[axis] = -1
        for step, weights in enumerate(self._weights):
            places = np.minimum(self._first + step, self.count - 1)
            part = values.take(places, axis)
            part *= weights.astype(values.dtype).reshape(shape)
            total = part if total is None else total + part
        assert total is not None
        return total
