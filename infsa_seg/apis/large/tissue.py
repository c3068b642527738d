# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where on a slide there is tissue, and not bare glass."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import cv2
import numpy as np

from infsa_seg.ops import bands_of
from infsa_seg.raster import (
    RasterReader,
    ResampledReader,
    Window,
    WrappedReader,
    open_raster,
)

# Height and width at most of a mask that is found, and of one that is given.
_FOUND, _GIVEN = 2048, 8192
# Saturation (of 255) below which everything is glass, whatever the threshold.
_LEAST_SATURATION = 12
# Shares of the mask's area.
_SPECK = 2e-5
# Of heights to widths.
_SAME_SHAPE = 0.02


def find_tissue(reader: RasterReader) -> np.ndarray:
    """Tell tissue from glass in a decimated read.

    Stained tissue has colour and glass has none: the saturation, smoothed, is
    divided by Otsu's threshold. Specks are dropped, gaps are closed, and a
    margin is left.

    Args:
        reader (RasterReader): Three channels of uint8.

    Returns:
        Bool (rows, columns), of at most 2048 pixels on a side, for the whole
        picture.

    Raises:
        ValueError: The raster has other channels.
    """
    meta = reader.meta
    if (meta.channels, meta.dtype) != (3, np.uint8):
        raise ValueError(
            f'has {meta.channels} channels of {meta.dtype}; tissue is found '
            'in RGB of 8 bits, give --tissue MASK'
        )
    scale = max(meta.height, meta.width) / _FOUND
    if scale > 1:
        reader = ResampledReader(
            reader,
            max(int(meta.height / scale), 1),
            max(int(meta.width / scale), 1),
        )
    whole = Window(0, 0, reader.meta.height, reader.meta.width)
    pixels = reader.read(whole)
    valid = reader.read_valid(whole)
    saturation = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)[..., 1]
    if valid is not None:
        saturation[~valid] = 0
    saturation = cv2.GaussianBlur(saturation, (0, 0), 2)
    threshold, _ = cv2.threshold(saturation, 0, 255, cv2.THRESH_OTSU)
    found = saturation > max(threshold, _LEAST_SATURATION)
    mask = cv2.morphologyEx(
        found.astype(np.uint8),
        cv2.MORPH_CLOSE,
        cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (9, 9)),
    )
    count, parts, sizes, _ = cv2.connectedComponentsWithStats(mask)
    large = sizes[:, cv2.CC_STAT_AREA] > _SPECK * mask.size
    large[0] = False  # what is around them
    mask = large[parts] if count else mask
    margin = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (5, 5))
    return cv2.dilate(mask.astype(np.uint8), margin).astype(bool)


def read_tissue(path: str | Path, reader: RasterReader) -> np.ndarray:
    """A mask that is given: tissue where it is not zero.

    Args:
        path (str | Path): A raster of any size and of the same shape.
        reader (RasterReader): The picture.

    Raises:
        OSError: It cannot be read.
        ValueError: It has more than one channel, or another shape.
    """
    with open_raster(path, indexed=True) as mask:
        meta, whole = mask.meta, reader.meta
        shape = (meta.height / meta.width) / (whole.height / whole.width)
        pixel = max(1 / meta.height, 1 / meta.width)
        if meta.channels != 1 or abs(shape - 1) > max(_SAME_SHAPE, pixel):
            raise ValueError(
                f'{path}: {meta.height}x{meta.width} pixels of '
                f'{meta.channels} channels; a mask of tissue has one, and the '
                f'shape of the picture, {whole.height}x{whole.width}'
            )
        step = -(-max(meta.height, meta.width) // _GIVEN)
        kept = []
        for rows in bands_of(meta.height, step):
            row = Window(rows.start, 0, 1, meta.width)
            found = mask.read(row)[0, ::step, 0] != 0
            valid = mask.read_valid(row)
            if valid is not None:
                found &= valid[0, ::step]
            kept.append(found)
        return np.stack(kept)


class TissueReader(WrappedReader):
    """A reader of which only the tissue is valid; glass is not even read.

    Args:
        reader (RasterReader): The picture.
        mask (ndarray): Bool (rows, columns), of any size, for all of it.
    """

    def __init__(self, reader: RasterReader, mask: np.ndarray) -> None:
        super().__init__(reader)
        self.mask = mask
        self.meta = dataclasses.replace(reader.meta, has_alpha=True)

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        pixels = self.reader.read(window, level)
        valid = self._tissue(window, level)
        known = self.reader.read_valid(window, level)
        return pixels, valid if known is None else valid & known

    def _load_valid(self, window: Window, level: int) -> np.ndarray:
        valid = self._tissue(window, level)
        # Only where there is tissue is it worth to ask the file.
        filled = valid.any(0).nonzero()[0]
        if len(filled) and not self.reader.meta.all_valid:
            first, last = int(filled[0]), int(filled[-1])
            part = window._replace(
                col=window.col + first, width=last + 1 - first
            )
            known = self.reader.read_valid(part, level)
            if known is not None:
                valid[:, first : last + 1] &= known
        return valid

    def _tissue(self, window: Window, level: int) -> np.ndarray:
        """Which pixels of a window the mask has, bool (height, width)."""
        size = self.meta.level_sizes[level]
        rows = _places(window.row, window.height, size[0], len(self.mask))
        columns = _places(
            window.col, window.width, size[1], self.mask.shape[1]
        )
        few, times = np.unique(rows, return_counts=True)
        if not self.mask[few[0] : few[-1] + 1].any():
            return np.zeros((window.height, window.width), bool)
        # Rows are copied as a whole, which is fast.
        return self.mask[few][:, columns].repeat(times, 0)


def _places(start: int, count: int, many: int, few: int) -> np.ndarray:
    """The pixels of a coarse side in which the centres of finer ones lie."""
    centres = 2 * np.arange(start, start + count) + 1
    return centres * few // (2 * many)
