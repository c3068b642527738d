# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster as the image that an executor reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from mmseg.models import BaseSegmentor
from torch import Tensor

from infsa_seg.ops import Rows, bands_of
from infsa_seg.raster import RasterReader, Window

# Of pixels that are looked at at once, beside what bands are planned for.
_STRIP_BYTES = 2**24


class RasterImage:
    """The valid part of a raster, normalised as the model was trained.

    Tokens are counted from the first valid row and column, and positions
    span the valid part: a collar of any width changes nothing inside.

    Args:
        reader (RasterReader): Source of the pixels.
        model (BaseSegmentor): Its ``data_preprocessor`` normalises them.
        window (Window): The part to read, of :func:`valid_window`.
        channels (sequence, optional): Numbers of the raster's channels, from
            1 on, in the order in which the model takes them.

    Raises:
        ValueError: The raster has other channels than the model, or the
            preprocessor pads test images to a fixed size.
    """

    def __init__(
        self,
        reader: RasterReader,
        model: BaseSegmentor,
        window: Window,
        channels: Sequence[int] | None = None,
    ) -> None:
        self.reader = reader
        self.window = window
        self.height, self.width = window.height, window.width
        self.channels: int = model.backbone.patch_embed.projection.in_channels
        have = reader.meta.channels
        self._chosen: list[int] | None = None
        if channels is not None:
            self._chosen = [number - 1 for number in channels]
            if not all(0 <= index < have for index in self._chosen):
                raise ValueError(
                    f'has channels 1 to {have}, not {list(channels)}'
                )
            have = len(self._chosen)
        if have not in (self.channels, 1):
            raise ValueError(
                f'has {have} channels, but the model takes {self.channels}; '
                'choose them with --channels'
            )
        self._normalise = copy.copy(model.data_preprocessor)
        if (getattr(self._normalise, 'test_cfg', None) or {}).get('size'):
            raise ValueError(
                'data_preprocessor.test_cfg pads to a fixed size, which has '
                'no meaning for bands of an image; leave it out'
            )
        # Tokens are padded where the image ends, by the network.
        self._normalise.test_cfg = None

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """Float (1, channels, rows, columns)."""
        pixels = self.reader.read(self._at(rows, columns))
        if self._chosen is not None:
            pixels = pixels[..., self._chosen]
        if pixels.dtype != np.uint8:
            pixels = pixels.astype(np.float32)
        if pixels.shape[2] != self.channels:
            pixels = np.repeat(pixels, self.channels, 2)
        elif self.channels == 3:
            # mmcv loads pictures as BGR, which the preprocessor counts on.
            pixels = pixels[..., ::-1]
        tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        inputs: Tensor = self._normalise({'inputs': [tensor]})['inputs']
        return inputs

    def read_valid(self, rows: Rows, columns: Rows) -> Tensor | None:
        """Bool (rows, columns), or None if all pixels are valid."""
        valid = self.reader.read_valid(self._at(rows, columns))
        return None if valid is None else torch.from_numpy(valid)

    def _at(self, rows: Rows, columns: Rows) -> Window:
        return Window(
            self.window.row + rows.start,
            self.window.col + columns.start,
            rows.num_rows,
            columns.num_rows,
        )


def rows_at_once(row_bytes: int) -> int:
    """As many rows as take little memory, at least one."""
    return max(_STRIP_BYTES // row_bytes, 1)


def strips_of(reader: RasterReader) -> list[Rows]:
    """The rows of a raster, so few at once that they take little memory."""
    meta = reader.meta
    row_bytes = meta.width * meta.channels * meta.dtype.itemsize
    return bands_of(meta.height, rows_at_once(row_bytes))


def valid_window(reader: RasterReader) -> Window | None:
    """The smallest window with every valid pixel; None if there is none.

    Validity alone is read, and not even that where all pixels are valid.
    """
    height, width = reader.meta.height, reader.meta.width
    columns = np.zeros(width, bool)
    rows = np.zeros(height, bool)
    for strip in strips_of(reader):
        window = Window(strip.start, 0, strip.num_rows, width)
        valid = reader.read_valid(window)
        if valid is None:
            return Window(0, 0, height, width)
        columns |= valid.any(0)
        rows[slice(*strip)] = valid.any(1)
    if not rows.any():
        return None
    top, left = rows.argmax(), columns.argmax()
    bottom, right = (
        len(flags) - flags[::-1].argmax() for flags in (rows, columns)
    )
    return Window(int(top), int(left), int(bottom - top), int(right - left))
