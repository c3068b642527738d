# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""TIFF and BigTIFF, of which only what a window meets is decoded."""

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .base import WindowReader, check_nodata, is_value, naming, valid_pixels
from .georeference import read_georeference
from .meta import RasterMeta
from .window import Window

MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')

_DAMAGED = 'is damaged or cut off; copy or download it again'
_GDAL_NODATA = 42113
# PhotometricInterpretation; others (CMYK, Lab, ...) are not shades of RGB.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
# Compression, ExtraSamples, PlanarConfiguration, NewSubfileType.
_JPEG, _APERIO_YCBCR = (6, 7), 33003
_ALPHA = (1, 2)
_PLANAR = 2
_MASK = 4
# Of tifffile: offset and length of a block, as objects in two tuples.
_NBYTES_PER_BLOCK = 80


class TiffReader(WindowReader):
    """Reads windows of the first picture of a TIFF file.

    Values are as stored: where white is zero, it stays so. A palette is
    resolved to red, green and blue, uint8, but ``meta.nodata`` is compared
    with the index. Pixels are valid where an alpha channel, and the mask that
    GDAL keeps beside the picture, say so. Blocks that were never written
    have the file's own value of nodata, else 0.

    One row of decoded blocks is kept, for the next band may begin in it.
    Rows of uncompressed strips are read as they are, and not kept.

    Args:
        path: The file.
        nodata: A pixel is invalid where all channels have this value. The
            default is the file's own, as GDAL writes it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged or cut off; its first picture is a stack;
            its colours or its compression are not supported; tifffile or
            imagecodecs is needed and not installed.
    """

    def __init__(
        self, path: Path, nodata: float | None = None, indexed: bool = False
    ) -> None:
        super().__init__(path)
        self._file: Any = None
        self._pid = 0
        self._picture, self._mask = self._open()
        page = self._picture.page
        alphas = _alpha_samples(page)
        samples = range(self._picture.samples)
        self._channels = [s for s in samples if s not in alphas]
        self._alphas = alphas
        self._colours = None if indexed else _palette(page)
        self._fill = _nodata(page, self._picture.dtype)
        if nodata is None:
            nodata = self._fill
        try:
            check_nodata(path, nodata, self._picture.dtype)
        except ValueError:
            self.close()
            raise
        paletted = self._colours is not None
        self.meta = RasterMeta(
            height=self._picture.height,
            width=self._picture.width,
            channels=3 if paletted else len(self._channels),
            dtype=np.dtype(np.uint8) if paletted else self._picture.dtype,
            nodata=nodata,
            has_alpha=bool(alphas) or self._mask is not None,
            nbytes_resident=sum(
                part.nbytes_resident
                for part in (self._picture, self._mask)
                if part is not None
            ),
            block_rows=self._picture.block_rows,
            georeference=read_georeference(path),
        )

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self._file is None or self._pid != os.getpid():
            self._picture, self._mask = self._open()
        with naming(self.path, _DAMAGED), _quiet():
            stored = self._picture.read(window, self._fill)
            opacities = [stored[..., sample] for sample in self._alphas]
            if self._mask is not None:
                opacities.append(self._mask.read(window, None)[..., 0])
        pixels = stored
        if self._alphas:
            pixels = np.take(stored, self._channels, axis=-1)
        valid = valid_pixels(pixels, self.meta.nodata, opacities)
        if self._colours is not None:
            pixels = self._colours[pixels[..., 0]]
        return np.ascontiguousarray(pixels), valid

    def _open(self) -> tuple['_Page', '_Page | None']:
        """Open the file for this process."""
        try:
            import tifffile
        except ImportError as error:
            raise ValueError(
                f'{self.path}: TIFF needs tifffile; run '
                "pip install 'infsa_seg[raster]'"
            ) from error
        with naming(self.path, _DAMAGED), _quiet():
            self._file = tifffile.TiffFile(self.path)
        # A forked process must not move its parent's place in the file.
        self._pid = os.getpid()
        try:
            with naming(self.path, _DAMAGED), _quiet():
                level = self._file.series[0].levels[0]
                page = level.keyframe
                is_stack = level.size != page.size or page.imagedepth != 1
            problem = _unsupported(page)
            if is_stack:
                problem = (
                    f'is a stack of shape {level.shape}, not one picture; '
                    'save the pictures one by one, or as channels'
                )
            if problem is not None:
                raise ValueError(f'{self.path}: {problem}')
            with naming(self.path, _DAMAGED), _quiet():
                picture = _Page(page)
                mask = _find_mask(self._file, page)
        except BaseException:
            self.close()
            raise
        return picture, mask

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        super().close()
        self._picture = self._mask = None  # type: ignore[assignment]
        if self._file is not None:
            self._file.close()
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, '_file': None, '_picture': None, '_mask': None}


class _Page:
    """One page of a file, by window.

    Args:
        page: A ``tifffile.TiffPage`` of depth 1.

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
        self.nbytes_resident = (
            self._num_kept
            * self.block_height
            * self._block_width
            * (self.samples // self._planes)
            * self.dtype.itemsize
        ) + _NBYTES_PER_BLOCK * len(page.dataoffsets)
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
        is_jpeg = page.compression in _JPEG and page.jpegheader is None
        if is_jpeg and content.rfind(b'\xff\xd9') < 0:
            raise ValueError(f'no end of JPEG block {index}')
        pixels: np.ndarray = page.decode(
            content,
            index,
            jpegtables=page.jpegtables,
            jpegheader=page.jpegheader,
        )[0]
        return pixels[0]


def check_complete(path: Path) -> None:
    """Make sure that every block of a file was written, in full.

    Raises:
        OSError: The file cannot be read.
        ValueError: Blocks are missing.
    """
    with TiffReader(path) as reader:
        page = reader._picture.page
        missing = sum(nbytes == 0 for nbytes in page.databytecounts)
    if missing:
        raise ValueError(f'{path}: {missing} of its blocks are missing')


def _unsupported(page: Any) -> str | None:
    """Say what about a page we cannot read, and what to do, if anything."""
    import tifffile

    if page.dtype is None or page.dtype.kind not in 'buif':
        return (
            f'has values of {page.bitspersample} bits, sample format '
            f'{page.sampleformat}; convert it to integers or float'
        )
    if not isinstance(page.bitspersample, int):
        return 'has channels of different types; convert it to one type'
    known = (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR)
    raw_ycbcr = page.photometric == _YCBCR and page.compression not in _JPEG
    if (
        page.photometric not in known
        or raw_ycbcr
        or page.compression == _APERIO_YCBCR
    ):
        name = getattr(page.photometric, 'name', page.photometric)
        return f'has its colours as {name}; convert it to RGB'
    # tifffile's tables name the package that they lack.
    for table, key in (
        (tifffile.TIFF.DECOMPRESSORS, page.compression),
        (tifffile.TIFF.UNPREDICTORS, page.predictor),
    ):
        if key == 1:
            continue
        try:
            table[key]
        except KeyError as error:
            name = getattr(key, 'name', key)
            if 'imagecodecs' in str(error):
                return (
                    f'is compressed with {name}, which needs imagecodecs; '
                    "run pip install 'infsa_seg[raster]'"
                )
            return (
                f'is compressed with {name}, which is unknown; convert it '
                'to Deflate'
            )
    return None


def _find_mask(file: Any, page: Any) -> _Page | None:
    """The page by which GDAL says what is valid in another, if any."""
    for other in file.pages:
        same_height = other.imagelength == page.imagelength
        same_width = other.imagewidth == page.imagewidth
        if other.subfiletype == _MASK and same_height and same_width:
            return _Page(other)
    return None


def _alpha_samples(page: Any) -> list[int]:
    """Which samples of a pixel are its opacity."""
    first = page.samplesperpixel - len(page.extrasamples)
    return [
        first + place
        for place, meaning in enumerate(page.extrasamples)
        if meaning in _ALPHA
    ]


def _palette(page: Any) -> np.ndarray | None:
    """The colours of a palette, uint8 (colours, 3), if there is one."""
    if page.photometric != _PALETTE or page.colormap is None:
        return None
    colours = np.asarray(page.colormap).T
    # Some write 8 bits where the standard has 16, as libtiff knows, too.
    if colours.max() > 255:
        colours = colours >> 8
    return np.ascontiguousarray(colours, np.uint8)


def _nodata(page: Any, dtype: np.dtype) -> float | None:
    """The file's own nodata, if it is a number that its type can have."""
    text = page.tags.valueof(_GDAL_NODATA)
    try:
        value = float(str(text).strip(' \0').replace(',', '.'))
    except ValueError:
        return None
    return value if is_value(value, dtype) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Take what tifffile logs: most is harmless, and one thing an error.

    Raises:
        ValueError: The chain of pages leads beyond the end of the file; a
            mask may have been among those that are lost.
    """
    lost: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if 'invalid page offset' in text or 'invalid offset to page' in text:
            lost.append(text)
        return False

    logger = logging.getLogger('tifffile')
    logger.addFilter(take)
    try:
        yield
    finally:
        logger.removeFilter(take)
    if lost:
        raise ValueError(lost[0])
