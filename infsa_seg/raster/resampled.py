# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster at another resolution."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .window import Window

if TYPE_CHECKING:
    from .reader import RasterReader

# Bytes of the finer pixels that are read at once.
_STRIP_BYTES = 2**21


class ResampledReader:
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
        self.reader, self.level = reader, finer[-1]
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
            + (0 if self.is_exact else 20 * _STRIP_BYTES),
            # Means of some pixels are none of its values.
            nodata=meta.nodata if self.is_exact else None,
            has_alpha=meta.has_alpha
            or not (self.is_exact or meta.all_valid),
            georeference=place,
            mpp=mpp,
        )

    def read(self, window: Window, level: int = 0) -> np.ndarray:
        """As :meth:`.reader.RasterReader.read` has it."""
        self._check(window, level)
        if self.is_exact:
            return self.reader.read(window, self.level)
        channels, dtype = self.meta.channels, self.meta.dtype
        out = np.empty((window.height, window.width, channels), dtype)
        kind = np.float32 if dtype == np.uint8 else np.float64
        for strip in self._strips(window):
            down, across = self._axes(strip)
            source = _source(down, across)
            pixels = self.reader.read(source, self.level).astype(kind)
            valid = self.reader.read_valid(source, self.level)
            if valid is not None:
                pixels[~valid] = 0
            means = across.mean(down.mean(pixels, 0), 1)
            if valid is not None:
                shares = across.mean(down.mean(valid.astype(kind), 0), 1)
                means /= np.maximum(shares, 1e-9)[..., None]
                means[shares < 0.5] = 0
            if dtype.kind in 'ui':
                limits = np.iinfo(dtype)
                means = np.rint(means).clip(limits.min, limits.max)
            out[strip.within(window)] = means
        return out

    def read_valid(self, window: Window, level: int = 0) -> np.ndarray | None:
        """As :meth:`.reader.RasterReader.read_valid` has it."""
        self._check(window, level)
        if self.is_exact:
            return self.reader.read_valid(window, self.level)
        if self.meta.all_valid:
            return None
        out = np.ones((window.height, window.width), bool)
        for strip in self._strips(window):
            down, across = self._axes(strip)
            valid = self.reader.read_valid(_source(down, across), self.level)
            if valid is not None:
                shares = valid.astype(np.float32)
                shares = across.mean(down.mean(shares, 0), 1)
                out[strip.within(window)] = shares >= 0.5
        return out

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        self.reader.close()

    def __enter__(self) -> ResampledReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, window: Window, level: int) -> None:
        size = self.meta.height, self.meta.width
        if level or min(window[2:]) < 1 or window.clip(*size) != window:
            raise ValueError(
                f'{tuple(window)} of level {level} is not within {size}'
            )

    def _strips(self, window: Window) -> list[Window]:
        """The window in parts whose finer pixels take little memory."""
        area = self.size[0] * self.size[1]
        area /= self.meta.height * self.meta.width
        nbytes = area * window.width * self.meta.channels
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


def _source(down: _Axis, across: _Axis) -> Window:
    return Window(down.start, across.start, down.count, across.count)
