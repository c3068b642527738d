# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One page of a TIFF, of which only what a window meets is decoded."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np

from .window import Window

# Compression and PlanarConfiguration.
JPEG = (6, 7)
_PLANAR = 2
# Of tifffile: offset and length of a block, as objects in two tuples.
_NBYTES_PER_BLOCK = 80


class Page:
    """One page of a file, by window.

    Args:
        page: A ``tifffile.TiffPage`` of depth 1.

    Attributes:
        nbytes_blocks: bytes of the row of decoded blocks that is kept.
        nbytes_tables: bytes of what says where the blocks are.

    Raises:
        ValueError: The table of its blocks is damaged, or leads beyond the
            end of the file.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.height: int = page.imagelength
        self.width: int = page.imagewidth
        self.samples: int = page.samplesperpixel
        # A bit is no type of its own to anyone who computes.
        self.dtype = np.dtype(
            np.uint8 if page.dtype.kind == 'b' else page.dtype
        )
        planar = page.planarconfig == _PLANAR and self.samples > 1
        self._planes = self.samples if planar else 1
        tiled = page.is_tiled
        self.block_height = page.tilelength if tiled else page.rowsperstrip
        self._block_width = page.tilewidth if tiled else self.width
        self._down = math.ceil(self.height / self.block_height)
        self._across = math.ceil(self.width / self._block_width)
        self._in_rows = (
            not tiled
            and page.compression == 1
            and page.predictor == 1
            and page.fillorder == 1
            and page.bitspersample == 8 * page.dtype.itemsize
        )
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()
        self._num_kept = 0 if self._in_rows else self._across * self._planes
        self.block_rows = 1 if self._in_rows else self.block_height
        self.nbytes_blocks = (
            self._num_kept
            * self.block_height
            * self._block_width
            * (self.samples // self._planes)
            * self.dtype.itemsize
        )
        self.nbytes_tables = _NBYTES_PER_BLOCK * len(page.dataoffsets)
        self._check_blocks()

    def _check_blocks(self) -> None:
        count = self._planes * self._down * self._across
        offsets, nbytes = self.page.dataoffsets, self.page.databytecounts
        if not len(offsets) == len(nbytes) == count:
            raise ValueError(
                f'{count} blocks, {len(offsets)} offsets, {len(nbytes)} sizes'
            )
        end = max(map(sum, zip(offsets, nbytes, strict=True)))
        if end > self.page.parent.filehandle.size:
            raise ValueError(f'blocks up to byte {end}')

    def read(self, window: Window, fill: float | None) -> np.ndarray:
        """Read all samples of a window.

        Args:
            window: It must lie within the page.
            fill: Value of blocks that were never written; None for 0.

        Returns:
            (height, width, samples).
        """
        out = np.empty((window.height, window.width, self.samples), self.dtype)
        read = self._read_strip if self._in_rows else self._read_block
        height, width = self.block_height, self._block_width
        last_row = window.row + window.height - 1
        last_col = window.col + window.width - 1
        for down in range(window.row // height, last_row // height + 1):
            for across in range(window.col // width, last_col // width + 1):
                block = Window(down * height, across * width, height, width)
                part = block.intersect(window)
                for plane in range(self._planes):
                    index = (plane * self._down + down) * self._across + across
                    target = out[part.within(window)]
                    if self._planes > 1:
                        target = target[..., plane : plane + 1]
                    if not self._is_written(index):
                        target[...] = fill or 0
                    else:
                        read(index, part, block, target)
        return out

    def forget(self) -> None:
        """Drop the decoded blocks."""
        self._blocks.clear()

    def _is_written(self, index: int) -> bool:
        offset, nbytes = self._place(index)
        return offset > 0 and nbytes > 0

    def _place(self, index: int) -> tuple[int, int]:
        return self.page.dataoffsets[index], self.page.databytecounts[index]

    def _read_strip(
        self, index: int, part: Window, block: Window, target: np.ndarray
    ) -> None:
        """Copy rows of an uncompressed strip, which may be the whole file."""
        file = self.page.parent.filehandle
        samples = target.shape[2]
        pixel = samples * self.dtype.itemsize
        stored = self.dtype.newbyteorder(self.page.parent.byteorder)
        start = self._place(index)[0] + part.col * pixel
        for row in range(part.height):
            below = part.row - block.row + row
            file.seek(start + below * self.width * pixel)
            content = file.read(part.width * pixel)
            target[row] = np.frombuffer(content, stored).reshape(-1, samples)

    def _read_block(
        self, index: int, part: Window, block: Window, target: np.ndarray
    ) -> None:
        """Copy a part of a block that is decoded as a whole."""
        pixels = self._blocks.get(index)
        if pixels is None:
            pixels = self._blocks[index] = self._decode(index)
            if len(self._blocks) > self._num_kept:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        target[...] = pixels[part.within(block)]

    def _decode(self, index: int) -> np.ndarray:
        """Decode a block: (rows, columns, samples of its plane)."""
        page, file = self.page, self.page.parent.filehandle
        offset, nbytes = self._place(index)
        file.seek(offset)
        content = file.read(nbytes)
        # libjpeg fills what is missing with grey, and is content. A page
        # with a header of its own (NDPI) has no ends of blocks.
        is_jpeg = page.compression in JPEG and page.jpegheader is None
        if is_jpeg and content.rfind(b'\xff\xd9') < 0:
            raise ValueError(f'no end of JPEG block {index}')
        pixels: np.ndarray = page.decode(
            content,
            index,
            jpegtables=page.jpegtables,
            jpegheader=page.jpegheader,
        )[0]
        return pixels[0]
