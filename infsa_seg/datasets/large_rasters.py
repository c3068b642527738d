# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Windows of rasters that are too large to be read whole, or to be cut up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.logging import print_log
from mmseg.registry import DATASETS

from infsa_seg.raster import open_raster

from .checked import CheckedSegDataset
from .transforms import LabelTable, Reading
from .windows import (
    BalancedWindows,
    GridWindows,
    RandomWindows,
    Size,
    find_classes,
)

# Windows that are looked at where too few pixels are valid.
_MAX_DRAWS = 10


@DATASETS.register_module()
class LargeRasters(CheckedSegDataset):
    """Windows straight from rasters and their masks, without any tiles.

    The pipeline begins with :class:`LoadWindow`, which reads what is needed
    of the files. A window is a function of ``seed``, epoch and index alone,
    whichever worker reads it. Where a raster is smaller than the window, the
    whole of it is given; training pads it.

    Masks are integers, one channel, of the size of their image. Their own
    nodata value is ignored unless it is one of the classes.

    Args:
        window (int | tuple[int, int]): Height and width in pixels.
        mode (str): ``'random'``, each pixel alike; ``'balanced'``, each class
            alike: about a pixel of a class that is drawn first; or
            ``'grid'``, all of every raster.
        length (int, optional): Windows in an epoch, if they are drawn.
            Defaults to as many as a grid has.
        stride (int | tuple[int, int], optional): Of the grid. Defaults to
            the window.
        min_valid (float): A drawn window with a smaller share of valid pixels
            is drawn again in the same raster, up to 10 times; then the best
            of them is taken.
        channels (sequence[int], optional): Numbers of the channels of the
            images, from 1 on, in the order of the model; ``(1, 1, 1)`` makes
            a colour picture of a grey one. Defaults to all.
        nodata (float, optional): Value of pixels of the images that are not
            valid, in place of the files' own.
        seed (int): Names the series of windows.
        img_suffix (str): Of the images.
        seg_map_suffix (str): Of the masks.
        lazy_init (bool): Leave the folders alone until first use.
        **kwargs: As for :class:`CheckedSegDataset`.

    Raises:
        FileNotFoundError: As for :class:`CheckedSegDataset`.
        OSError: A file cannot be read.
        ValueError: An argument does not fit; a mask is missing, has another
            size than its image, or is no raster of integers; an image lacks a
            channel. On access: a mask has values that are no class.
    """

    # What LoadWindow is told of a draw.
    passes_share = True

    def __init__(
        self,
        window: int | tuple[int, int] = 4096,
        mode: str = 'random',
        length: int | None = None,
        stride: int | tuple[int, int] | None = None,
        min_valid: float = 0.0,
        channels: Sequence[int] | None = None,
        nodata: float | None = None,
        seed: int = 0,
        img_suffix: str = '.tif',
        seg_map_suffix: str = '.tif',
        lazy_init: bool = False,
        **kwargs: Any,
    ) -> None:
        self.window = _pair('window', window)
        self.stride = (
            self.window if stride is None else _pair('stride', stride)
        )
        self.mode, self.length, self.seed = mode, length, seed
        self.min_valid, self.nodata = min_valid, nodata
        self.channels = None if channels is None else tuple(channels)
        self._check_arguments(stride)
        # Shared, so that workers which stay between epochs see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        super().__init__(
            img_suffix=img_suffix,
            seg_map_suffix=seg_map_suffix,
            lazy_init=lazy_init,
            **kwargs,
        )

    @property
    def epoch(self) -> int:
        """The epoch of which the windows are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw other windows from now on, in running workers too.

        Args:
            epoch (int): 0 or more; the same number gives the same windows.
        """
        self._epoch.fill_(epoch)

    def full_init(self) -> None:
        """List the rasters, check them, and get ready to draw."""
        if self._fully_initialized:
            return
        self._labels = self._make_labels()
        super().full_init()
        infos = []
        for index in range(super().__len__()):
            infos.append(super().get_data_info(index))
        sizes = [info['raster_size'] for info in infos]
        self._grid = GridWindows(sizes, self.window, self.stride)
        self._drawn: RandomWindows | BalancedWindows | None = None
        if self.mode == 'random':
            self._drawn = RandomWindows(sizes, self.window)
        elif self.mode == 'balanced':
            self._drawn = self._balance(infos, sizes)

    def load_data_list(self) -> list[dict[str, Any]]:
        """List the pairs of image and mask, with the size of each."""
        data_list = super().load_data_list()
        first = ''
        count = 0
        for info in data_list:
            path = info['img_path']
            info['raster_size'], channels = self._check_image(path)
            if channels != (count or channels):
                raise ValueError(
                    f'{path}: has {channels} channels, {first} has {count}; '
                    'choose those that all images have with channels'
                )
            first, count = first or path, channels
            if 'seg_map_path' in info:
                self._check_sizes(info)
        return data_list

    def __len__(self) -> int:
        """How many windows there are in an epoch."""
        if not self._fully_initialized:
            self.full_init()
        if self.length is not None:
            return self.length
        return len(self._grid)

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """What :class:`LoadWindow` needs to know of a window.

        Args:
            idx (int): Number of the window.
        """
        share = getattr(idx, 'share', None)
        length = len(self)
        if not -length <= idx < length:
            raise IndexError(f'there are {length} windows, not {idx}')
        idx %= length
        if self._drawn is None:
            raster, window = self._grid[idx]
            windows = [window]
        else:
            rng = np.random.default_rng((self.seed, self.epoch, idx))
            count = _MAX_DRAWS if self.min_valid > 0 else 1
            raster, windows = self._drawn.draw(rng, count)
        info = super().get_data_info(raster)
        info['sample_idx'] = idx
        info['windows'] = windows
        info['share'] = share
        info['reading'] = Reading(
            self._labels, self.channels, self.nodata, self.min_valid
        )
        return info

    def prepare_data(self, idx: int) -> Any:
        """Run the pipeline on a window."""
        return self.pipeline(self.get_data_info(idx))

    def _check_arguments(self, stride: Any) -> None:
        if self.mode not in ('random', 'balanced', 'grid'):
            raise ValueError(
                f"mode={self.mode!r} is unknown; use 'random', 'balanced' or "
                "'grid'"
            )
        grid = self.mode == 'grid'
        if grid and (self.length is not None or self.min_valid > 0):
            raise ValueError(
                'length and min_valid are for windows that are drawn; mode '
                "'grid' has all of them"
            )
        if not grid and stride is not None:
            raise ValueError("stride is for mode 'grid'; leave it out")
        if any(s > w for s, w in zip(self.stride, self.window, strict=True)):
            raise ValueError(
                f'stride={self.stride} leaves gaps between windows of '
                f'{self.window}; make it smaller'
            )
        if self.length is not None and self.length < 1:
            raise ValueError(f'length={self.length}: give 1 or more')
        if not 0 <= self.min_valid <= 1:
            raise ValueError(
                f'min_valid={self.min_valid}: give a share from 0 to 1'
            )
        if self.seed < 0:
            raise ValueError(f'seed={self.seed}: give 0 or more')
        if self.channels is not None and min(self.channels, default=0) < 1:
            raise ValueError(
                f'channels={self.channels}: give numbers from 1 on'
            )

    def _make_labels(self) -> LabelTable:
        """The class index of every value that a mask may have."""
        shift = int(self.reduce_zero_label)
        indices = {}
        for value in (*self._class_values(), *self.label_values):
            index = (self.label_map or {}).get(value - shift, value - shift)
            # Upstream writes 255 where a class was not picked.
            beyond = not 0 <= index < len(self.metainfo['classes'])
            indices[value] = self.ignore_index if beyond else index
        if shift:
            indices.setdefault(0, self.ignore_index)
        indices.setdefault(self.ignore_index, self.ignore_index)
        return LabelTable(
            indices, len(self.metainfo['classes']), self.ignore_index
        )

    def _check_image(self, path: str) -> tuple[Size, int]:
        """The size of an image, and how many channels it gives."""
        with open_raster(path, self.nodata) as reader:
            meta = reader.meta
        size = meta.height, meta.width
        if self.channels is None:
            return size, meta.channels
        if max(self.channels) > meta.channels:
            raise ValueError(
                f'{path}: has channels 1 to {meta.channels}, not '
                f'{list(self.channels)}; choose others with channels'
            )
        return size, len(self.channels)

    def _check_mask(self, path: str) -> None:
        """Check the form of a mask; its values are checked as it is read."""
        self._mask_size(path)

    def _mask_size(self, path: str) -> Size:
        with open_raster(path, indexed=True) as reader:
            meta = reader.meta
        if meta.channels != 1:
            raise ValueError(
                f'{path}: is a picture with {meta.channels} channels; masks '
                'have one, of class indices: convert its colours, to a TIFF '
                'or a grey PNG'
            )
        if meta.dtype.kind not in 'ui':
            raise ValueError(
                f'{path}: has values of type {meta.dtype}; masks have '
                'integers: convert it'
            )
        return meta.height, meta.width

    def _check_sizes(self, info: dict[str, Any]) -> None:
        path = info['seg_map_path']
        size = self._mask_size(path)
        if size != info['raster_size']:
            height, width = info['raster_size']
            raise ValueError(
                f'{path}: has {size[0]}x{size[1]} pixels, its image '
                f'{info["img_path"]} {height}x{width}; make the mask anew on '
                'the pixels of the image'
            )

    def _balance(
        self, infos: list[dict[str, Any]], sizes: list[Size]
    ) -> BalancedWindows:
        if any('seg_map_path' not in info for info in infos):
            raise ValueError(
                "mode 'balanced' needs masks: set data_prefix.seg_map_path"
            )
        print_log(f'looking for classes in {len(infos)} masks', 'current')
        pixels = []
        for number, info in enumerate(infos):
            path = info['seg_map_path']
            with open_raster(path, indexed=True) as mask:
                pixels.append(find_classes(mask, self._labels, path, number))
        if not any(pixels):
            raise ValueError(
                f'{self.data_prefix["seg_map_path"]}: no mask has a pixel '
                'that counts; is everything ignored?'
            )
        return BalancedWindows(sizes, self.window, pixels)


def _pair(name: str, value: int | Sequence[int]) -> Size:
    """Height and width."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(
            f'{name}={value}: give a positive number of pixels, or two'
        )
    return pair
