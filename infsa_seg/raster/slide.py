# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Slides of microscopes, in the formats of their makers."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from .base import (
    WindowReader,
    check_nodata,
    naming,
    valid_pixels,
)
from .meta import RasterMeta
from .resolution import Mpp, mpp_of_values
from .window import Window

# Sides of the blocks that are read at once: about this, of whole tiles, unless
# the tiles are very large. Beyond 4096 OpenSlide divides a region.
_SIDE, _LARGEST = 256, 2048
# Bytes of decoded tiles that OpenSlide keeps.
_CACHE_NBYTES = 32 * 2**20
# What a slide that fits no format of its own is to OpenSlide.
_GENERIC = 'generic-tiff'


def vendor_of(path: Path) -> str | None:
    """The maker whose format a file has.

    Args:
        path: Any file.

    Returns:
        OpenSlide's name of it; None if it is no such file, if it is only a
        tiled TIFF like any other, or if openslide is not installed.
    """
    try:
        import openslide
    except ImportError:
        return None
    try:
        vendor: str | None = openslide.OpenSlide.detect_format(path)
    except openslide.OpenSlideError:
        return None
    return None if vendor == _GENERIC else vendor


class SlideReader(WindowReader):
    """Reads windows of a slide and of its levels through OpenSlide.

    Pixels are red, green and blue, uint8. Where the slide is transparent, the
    colour of its background shows through, white if it names none; where it
    is wholly so, as outside of what was scanned, pixels are not valid.

    OpenSlide places a region by pixels of level 0. Where a level is not
    smaller by a whole number, that is up to half of such a pixel beside the
    level's own pixels, and OpenSlide interpolates. So that pixels do not
    depend on the window, only blocks of a fixed grid of each level are read,
    each placed as well as can be, and windows are cut out of them. One row
    of blocks is kept: of the level read last.

    Args:
        path: A file that OpenSlide knows; if a slide is of several files, the
            one that it is opened by.
        nodata: A pixel is also invalid where all channels have this value.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, no slide, or openslide is not installed.
    """

    def __init__(self, path: Path, nodata: float | None = None) -> None:
        super().__init__(path)
        self._slide: Any = None
        self._pid = 0
        self._last = 0
        self._blocks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        check_nodata(path, nodata, np.dtype(np.uint8))
        slide = self._open()
        properties = slide.properties
        # Masks beside a picture are to OpenSlide levels of the same size.
        numbers: dict[tuple[int, int], int] = {}
        for number, size in enumerate(slide.level_dimensions):
            numbers.setdefault((size[1], size[0]), number)
        sizes = tuple(numbers)
        self._numbers = tuple(numbers.values())
        self._scales = tuple(slide.level_downsamples[n] for n in self._numbers)
        self._background = _background(properties)
        self._grids = tuple(
            tuple(
                min(_side(properties, number, name), length)
                for name, length in zip(('height', 'width'), size, strict=True)
            )
            for size, number in numbers.items()
        )
        self.meta = RasterMeta(
            height=sizes[0][0],
            width=sizes[0][1],
            channels=3,
            dtype=np.dtype(np.uint8),
            nodata=nodata,
            has_alpha=True,
            nbytes_resident=_CACHE_NBYTES
            + max(
                4 * height * width * self._num_kept(size[1], width)
                for size, (height, width) in zip(
                    sizes, self._grids, strict=True
                )
            ),
            block_rows=self._grids[0][0],
            level_sizes=sizes,
            mpp=_mpp(properties),
        )

    @staticmethod
    def _num_kept(width: int, block_width: int) -> int:
        return -(-width // block_width)

    def _open(self) -> Any:
        """The slide, opened for this process."""
        if self._pid != os.getpid():
            self._slide = None
        if self._slide is None:
            try:
                import openslide
            except ImportError as error:
                raise ValueError(
                    f'{self.path}: slides need openslide; run '
                    "pip install 'infsa_seg[raster]'"
                ) from error
            with naming(self.path, 'cannot be read'), self.path.open('rb'):
                pass
            with naming(
                self.path,
                'is damaged, or no slide that OpenSlide knows; copy it again '
                'with all of its files, or use another reader',
            ):
                self._slide = openslide.OpenSlide(self.path)
                self._slide.set_cache(openslide.OpenSlideCache(_CACHE_NBYTES))
            self._pid = os.getpid()
        return self._slide

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if level != self._last:
            self._blocks.clear()
            self._last = level
        pixels = np.empty((window.height, window.width, 3), np.uint8)
        alpha = np.empty((window.height, window.width), np.uint8)
        height, width = self._grids[level]
        size = self.meta.level_sizes[level]
        last_row = window.row + window.height - 1
        last_col = window.col + window.width - 1
        for down in range(window.row // height, last_row // height + 1):
            for across in range(window.col // width, last_col // width + 1):
                block = Window(down * height, across * width, height, width)
                block = block.clip(*size)
                stored = self._block(block, level, window)
                part = block.intersect(window)
                inner, outer = part.within(block), part.within(window)
                pixels[outer] = stored[..., :3][inner]
                alpha[outer] = stored[..., 3][inner]
        return pixels, valid_pixels(pixels, self.meta.nodata, [alpha])

    def _block(self, block: Window, level: int, window: Window) -> np.ndarray:
        """A block of the grid, on the background, with its alpha."""
        key = (block.row, block.col)
        stored = self._blocks.get(key)
        if stored is None:
            stored = self._blocks[key] = self._read(block, level, window)
            width = self.meta.level_sizes[level][1]
            if len(self._blocks) > self._num_kept(
                width, self._grids[level][1]
            ):
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return stored

    def _read(self, block: Window, level: int, window: Window) -> np.ndarray:
        scale = self._scales[level]
        place = (round(block.col * scale), round(block.row * scale))
        slide = self._open()
        try:
            region = slide.read_region(
                place, self._numbers[level], (block.width, block.height)
            )
        except MemoryError:
            raise
        except Exception as error:
            # After one error OpenSlide says nothing else.
            self.close()
            said = ' '.join(str(error).split())
            raise ValueError(
                f'{self.path}: level {level} is damaged within the '
                f'{window.height}x{window.width} pixels at ({window.row}, '
                f'{window.col}): {said}; copy or download it again'
            ) from error
        stored = np.array(region)
        alpha = stored[..., 3]
        if alpha.min() < 255:
            _composite(stored, self._background)
        return stored

    def close(self) -> None:
        """Close the slide; a later read opens it again."""
        super().close()
        self._blocks.clear()
        slide, self._slide = self._slide, None
        if slide is not None and self._pid == os.getpid():
            slide.close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, '_slide': None, '_blocks': OrderedDict()}


def _composite(stored: np.ndarray, background: np.ndarray) -> None:
    """Lay what is transparent on a colour.

    Args:
        stored: uint8 (height, width, 4), alpha last and not multiplied; its
            colours are changed.
        background: uint8 (3,).
    """
    alpha = stored[..., 3:].astype(np.uint32)
    mixed = stored[..., :3] * alpha + background * (255 - alpha) + 127
    stored[..., :3] = mixed // 255


def _background(properties: Any) -> np.ndarray:
    """The colour behind a slide, uint8 (3,): white, if it names none."""
    text = properties.get('openslide.background-color', '')
    try:
        colour = list(bytes.fromhex(text))
    except ValueError:
        colour = []
    return np.array(colour if len(colour) == 3 else [255] * 3, np.uint8)


def _side(properties: Any, level: int, name: str) -> int:
    """Height or width of the blocks of a level."""
    text = properties.get(f'openslide.level[{level}].tile-{name}', '')
    tile = int(text) if text.isdigit() else 0
    if not 0 < tile <= _LARGEST:
        return _SIDE
    return tile * max(round(_SIDE / tile), 1)


def _mpp(properties: Any) -> Mpp | None:
    sizes = []
    for axis in 'yx':
        try:
            sizes.append(float(properties[f'openslide.mpp-{axis}']))
        except (KeyError, ValueError):
            return None
    return mpp_of_values(*sizes)
