# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A window of a raster and of its mask, where others load two files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mmcv
import numpy as np
from mmcv.transforms import BaseTransform, RandomFlip
from mmseg.registry import TRANSFORMS

from infsa_seg.raster import RasterReader, Window, open_raster

from .seeded import CropShare

# Of a mask: numbers of entries of a table take eight times its bytes.
_ROWS_AT_ONCE = 128
_UNKNOWN = np.iinfo(np.int16).min
# What the readers of one process may keep of pixels and tables.
_KEPT_NBYTES = 2**30


class LabelTable:
    """What the values of masks mean.

    Args:
        indices (dict[int, int]): The class index of each value that a mask
            may have, or ``ignore_index``.
        num_classes (int): How many classes there are.
        ignore_index (int): Of pixels that do not count.
    """

    def __init__(
        self, indices: dict[int, int], num_classes: int, ignore_index: int
    ) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.classes = [v for v, i in indices.items() if i != ignore_index]
        # One entry on each side stands for everything beyond.
        self._first = min(indices) - 1
        size = max(indices) - self._first + 2
        self._table = np.full(size, _UNKNOWN, np.int16)
        for value, index in indices.items():
            self._table[value - self._first] = index
        small = 0 <= ignore_index <= 255 and num_classes <= 256
        self.dtype = np.dtype(np.uint8 if small else np.int16)

    def indices(
        self, values: np.ndarray, path: str, nodata: float | None = None
    ) -> np.ndarray:
        """Turn values of a mask into class indices.

        Args:
            values (np.ndarray): Integers (height, width).
            path (str): The mask, for the error.
            nodata (float, optional): A value that is ignored, unless it is
                one of a class: the background of many masks is so marked.

        Returns:
            np.ndarray: Of the same shape; uint8 if that holds all of them,
            else int16.

        Raises:
            ValueError: There are values that mean nothing.
        """
        found = np.empty(values.shape, np.int16)
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            places = values[rows].astype(np.int64) - self._first
            np.take(self._table, places, out=found[rows], mode='clip')
        unknown = found == _UNKNOWN
        if nodata is not None and unknown.any():
            found[unknown & (values == nodata)] = self.ignore_index
            unknown = found == _UNKNOWN
        if unknown.any():
            wrong, counts = np.unique(values[unknown], return_counts=True)
            named = ', '.join(
                f'{value} ({count} pixels)'
                for value, count in zip(wrong[:3], counts, strict=False)
            )
            raise ValueError(
                f'{path}: has values that are no class: {named}. Classes are '
                f'{min(self.classes)} to {max(self.classes)}, '
                f'{self.ignore_index} is ignored; say with label_values what '
                f'others mean, e.g. label_values={{{wrong[0]}: '
                f'{self.ignore_index}}} to ignore'
            )
        return found.astype(self.dtype)


@dataclass(frozen=True)
class Reading:
    """How a dataset wants its windows read.

    Args:
        labels (LabelTable): What the values of masks mean.
        channels (tuple[int, ...], optional): Channels of the image, from 1
            on, in the order of the model. Defaults to all.
        nodata (float, optional): Of images, in place of their own.
        min_valid (float): Share of valid pixels below which the next of the
            windows is tried.
    """

    labels: LabelTable
    channels: tuple[int, ...] | None = None
    nodata: float | None = None
    min_valid: float = 0.0


class OpenRasters:
    """Rasters that stay open, the one used longest ago closed first.

    A copy, and what is pickled, begins without any: each process opens its
    own.

    Args:
        max_open (int): How many files.
    """

    def __init__(self, max_open: int = 16) -> None:
        if max_open < 1:
            raise ValueError(f'max_open={max_open}: give 1 or more')
        self.max_open = max_open
        self._readers: OrderedDict[tuple[Any, ...], RasterReader]
        self._readers = OrderedDict()

    def get(self, path: str, **kwargs: Any) -> RasterReader:
        """A reader of a file.

        Args:
            path (str): The file.
            **kwargs: As for :func:`infsa_seg.raster.open_raster`.
        """
        key = (path, *sorted(kwargs.items()))
        if key not in self._readers:
            self._readers[key] = open_raster(path, **kwargs)
        self._readers.move_to_end(key)
        while len(self._readers) > 1 and not self._fits():
            self._readers.popitem(last=False)[1].close()
        return self._readers[key]

    def _fits(self) -> bool:
        nbytes = sum(r.meta.nbytes_resident for r in self._readers.values())
        return len(self._readers) <= self.max_open and nbytes <= _KEPT_NBYTES

    def __len__(self) -> int:
        return len(self._readers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_open,)


@TRANSFORMS.register_module()
class DrawFlip(RandomFlip):
    """mmcv's ``RandomFlip``, done by :class:`LoadWindow` after it.

    Which rows of a raster a process needs depends on how they will lie.

    Args:
        *args, **kwargs: As for ``RandomFlip``.
    """

    def _flip(self, results: dict[str, Any]) -> None:
        """Leave that to the loading."""


@TRANSFORMS.register_module()
class LoadWindow(BaseTransform):
    """Read a window that :class:`LargeRasters` gives, image and labels.

    Pixels that are not valid (nodata, transparent, NaN) are 0 in the image,
    and ignored in the labels. Values other than uint8 become float32, as
    they do where a trained model is run.

    Required Keys:

    - img_path
    - seg_map_path (optional)
    - windows (list[Window]): The first that is valid enough is taken, else
      the best.
    - reading (:class:`Reading`)
    - flip_direction (str, optional): Of :class:`DrawFlip`; it is turned so.
    - share (:class:`CropShare`, optional): The rows of what comes out that
      are wanted. Only these are read; where ``min_valid`` is set, the
      validity of all is.

    Modified Keys:

    - img (uint8 or float32, (H, W, C); three channels as BGR, as mmcv loads
      pictures)
    - img_shape
    - ori_shape
    - window (Window): Where it was read, in pixels of the raster.
    - gt_seg_map ((H, W), uint8; int16 if that does not hold the classes)
    - seg_fields

    Args:
        max_open (int): Files that each process keeps open.
    """

    # It can read a part of what it would read.
    reads_share = True

    def __init__(self, max_open: int = 16) -> None:
        self.rasters = OpenRasters(max_open)

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Read the window in ``results``.

        Raises:
            OSError: A file cannot be read.
            ValueError: It is damaged, or the mask has values of no class.
        """
        reading: Reading = results.pop('reading')
        image = self.rasters.get(results['img_path'], nodata=reading.nodata)
        window = _choose(image, results.pop('windows'), reading.min_valid)
        results['window'] = window
        flip = results.get('flip_direction')
        share: CropShare | None = results.pop('share', None)
        num_rows = window.height
        if share is not None:
            num_rows = share.within(window.height).num_rows
            window = _take_share(window, share, flip)
        pixels, valid = image.read(window), image.read_valid(window)
        results['img'] = as_loaded(pixels, reading.channels)
        if valid is not None:
            results['img'][~valid] = 0
        if results.get('seg_map_path') is not None:
            labels = self._read_labels(
                results['seg_map_path'], window, reading.labels
            )
            if valid is not None:
                labels[~valid] = reading.labels.ignore_index
            results['gt_seg_map'] = labels
            results['seg_fields'].append('gt_seg_map')
        if flip is not None:
            for name in ('img', *results['seg_fields']):
                results[name] = mmcv.imflip(results[name], flip)
        results['img_shape'] = results['ori_shape'] = num_rows, window.width
        return results

    def _read_labels(
        self, path: str, window: Window, table: LabelTable
    ) -> np.ndarray:
        mask = self.rasters.get(path, indexed=True)
        values = mask.read(window)[..., 0]
        labels = table.indices(values, path, mask.meta.nodata)
        valid = mask.read_valid(window) if mask.meta.has_alpha else None
        if valid is not None:
            labels[~valid & (values != mask.meta.nodata)] = table.ignore_index
        return labels

    def __repr__(self) -> str:
        return f'{type(self).__name__}(max_open={self.rasters.max_open})'


def as_loaded(
    pixels: np.ndarray, channels: Sequence[int] | None = None
) -> np.ndarray:
    """Pixels of a raster in the form in which mmcv loads pictures.

    Args:
        pixels (np.ndarray): (H, W, C) as a raster reader gives them.
        channels (sequence, optional): Numbers of channels, from 1 on.

    Returns:
        np.ndarray: Contiguous, uint8 or float32; three channels reversed.
    """
    if channels is not None:
        pixels = pixels[..., [number - 1 for number in channels]]
    if pixels.dtype != np.uint8:
        pixels = pixels.astype(np.float32)
    if pixels.shape[2] == 3:
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(pixels)


def _choose(
    reader: RasterReader, windows: Sequence[Window], min_valid: float
) -> Window:
    """The first window that is valid enough, else the best."""
    if min_valid <= 0:
        return windows[0]
    chosen, most = windows[0], -1.0
    for window in windows:
        valid = reader.read_valid(window)
        part = 1.0 if valid is None else float(valid.mean())
        if part > most:
            chosen, most = window, part
        if part >= min_valid:
            break
    return chosen


def _take_share(window: Window, share: CropShare, flip: str | None) -> Window:
    """The rows of a raster that become the share of its flipped window."""
    rows = share.to_read(window.height)
    start = rows.start
    if flip in ('vertical', 'diagonal'):
        start = window.height - rows.stop
    return Window(window.row + start, window.col, rows.num_rows, window.width)
