# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster as the image that an executor reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from mmengine.model import BaseModel
from torch import Tensor

from infsa_seg.ops import Rows, bands_of
from infsa_seg.raster import RasterReader, Window

# Of pixels that are looked at at once, beside what bands are planned for.
_STRIP_BYTES = 2**24
# Along each side: places that are looked at, and their size in pixels; the
# longer side of the level that is looked at, at least.
_NUM_SPOTS, _SPOT, _SAMPLED = 12, 32, 2048
# Of normalised values: more is another scale, and less is none at all.
_FAR, _FLAT = 10, 0.1


class RasterImage:
    """The valid part of a raster, normalised as the model was trained.

    Tokens are counted from the first valid row and column, and positions
    span the valid part: a collar of any width changes nothing inside.

    Args:
        reader (RasterReader): Source of the pixels.
        model (BaseModel): Its ``data_preprocessor`` normalises them.
        window (Window): The part to read, of :func:`valid_window`.
        channels (sequence, optional): Numbers of the raster's channels, from
            1 on, in the order in which the model takes them.
        stretch (sequence, optional): Percentiles of the values in each
            channel that become 0 and 255, from a look at the whole raster.

    Attributes:
        value_range (tuple | None): The least and the largest value that was
            seen in looking for them; None where nothing is valid.
        notes (list[str]): What looks wrong about the values.

    Raises:
        ValueError: The raster has other channels than the model, or the
            preprocessor has means or deviations for others, or pads test
            images to a fixed size.
    """

    def __init__(
        self,
        reader: RasterReader,
        model: BaseModel,
        window: Window,
        channels: Sequence[int] | None = None,
        stretch: Sequence[float] | None = None,
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
        for name in ('mean', 'std'):
            values = getattr(self._normalise, name, None)
            count = 1 if values is None else len(values)
            if count not in (1, self.channels):
                raise ValueError(
                    f'data_preprocessor.{name} has {count} values '
                    f'for the {self.channels} channels of the model'
                )
        # Tokens are padded where the image ends, by the network.
        self._normalise.test_cfg = None
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        values = self.choose(sample_values(reader, window))
        self.value_range: tuple[float, float] | None = None
        self.notes: list[str] = []
        if not len(values):
            return
        self.value_range = float(values.min()), float(values.max())
        if stretch is not None:
            low, high = np.percentile(values, stretch, 0)
            self._scale = low, np.maximum(high - low, 1e-12)
        self.notes = self._doubt(values)

    @property
    def is_stretched(self) -> bool:
        """Whether values are changed before the model's normalisation."""
        return self._scale is not None

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """Float (1, channels, rows, columns)."""
        pixels = self.reader.read(self._at(rows, columns))
        return self._prepare(self.choose(pixels))

    def choose(self, pixels: np.ndarray) -> np.ndarray:
        """The channels (..., n) that the model gets, in its order."""
        return pixels if self._chosen is None else pixels[..., self._chosen]

    def _prepare(self, pixels: np.ndarray) -> Tensor:
        """What the network gets of chosen channels (rows, columns, n)."""
        if pixels.dtype != np.uint8 or self._scale is not None:
            pixels = pixels.astype(np.float32)
        if self._scale is not None:
            low, width = self._scale
            pixels = ((pixels - low) * (255 / width)).clip(0, 255)
            pixels = pixels.astype(np.float32)
        if pixels.shape[2] != self.channels:
            pixels = np.repeat(pixels, self.channels, 2)
        elif self.channels == 3:
            # mmcv loads pictures as BGR, which the preprocessor counts on.
            pixels = pixels[..., ::-1]
        tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
        inputs: Tensor = self._normalise({'inputs': [tensor]})['inputs']
        return inputs

    def _doubt(self, values: np.ndarray) -> list[str]:
        """Say what if the values are not like those of the training."""
        if not getattr(self._normalise, '_enable_normalize', True):
            return []
        seen = self._prepare(values[None])[0].flatten(1).float().numpy()
        low, high = np.percentile(seen, (2, 98), 1)
        is_far = max(abs(low).max(), abs(high).max()) > _FAR
        is_flat = self.reader.meta.dtype.kind == 'f' and not (
            (high - low > _FLAT).any()
        )
        if not (is_far or is_flat):
            return []
        first, last = values.min(), values.max()
        return [
            f'values from {first:g} to {last:g} become '
            f'{low.min():.3g} to {high.max():.3g} by the mean and deviation '
            'of the model, which expects about -3 to 3; use the data that it '
            'was trained on, or --stretch 2,98'
        ]

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


def sample_values(reader: RasterReader, window: Window) -> np.ndarray:
    """Values of valid pixels from all over a window.

    They are of its coarse level, if it has one, or of some spots.

    Returns:
        (n, channels) of pixels that are valid, if any is.
    """
    meta = reader.meta
    sizes = meta.level_sizes
    level = max(
        (i for i, size in enumerate(sizes) if max(size) >= _SAMPLED),
        default=0,
    )
    height, width = sizes[level]
    found = []
    for row in _spots(window.row, window.height, height / meta.height):
        for col in _spots(window.col, window.width, width / meta.width):
            spot = Window(row, col, _SPOT, _SPOT).clip(height, width)
            pixels = reader.read(spot, level).reshape(-1, meta.channels)
            valid = reader.read_valid(spot, level)
            if valid is not None:
                pixels = pixels[valid.ravel()]
            found.append(pixels)
    return np.concatenate(found)


def _spots(start: int, length: int, scale: float) -> list[int]:
    """Where to look along a side, evenly, in pixels of a level."""
    count = min(_NUM_SPOTS, -(-length // _SPOT))
    return [
        int((start + length * index / count) * scale) for index in range(count)
    ]


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
