# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""TIFF and BigTIFF, of which only what a window meets is decoded."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .base import (
    Unsupported,
    WindowReader,
    check_nodata,
    is_level,
    is_value,
    naming,
    valid_pixels,
)
from .georeference import Georeference, read_georeference
from .meta import RasterMeta
from .resolution import (
    Mpp,
    mpp_of_aperio,
    mpp_of_georeference,
    mpp_of_ome,
    mpp_of_tags,
)
from .tiff_page import JPEG, Page
from .window import Window

MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')

_DAMAGED = 'is damaged or cut off; copy or download it again'
_GDAL_NODATA = 42113
# XResolution, YResolution, ResolutionUnit.
_RESOLUTION = 282, 283, 296
# PhotometricInterpretation; others (CMYK, Lab, ...) are not shades of RGB.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
# Compression, ExtraSamples, a bit of NewSubfileType.
_APERIO_YCBCR = 33003
_ALPHA = (1, 2)
_MASK = 4


class _Level(NamedTuple):
    """A picture, and the page by which GDAL says what is valid in it."""

    picture: Page
    mask: Page | None

    @property
    def pages(self) -> list[Page]:
        return [page for page in self if page is not None]


class TiffReader(WindowReader):
    """Reads windows of the first picture of a TIFF file, and of its levels.

    Values are as stored: where white is zero, it stays so. A palette is
    resolved to red, green and blue, uint8, but ``meta.nodata`` is compared
    with the index. Pixels are valid where an alpha channel, and the mask that
    GDAL keeps beside the picture, say so. Blocks that were never written
    have the file's own value of nodata, else 0.

    One row of decoded blocks is kept, for the next band may begin in it: of
    the level read last. Rows of uncompressed strips are read as they are, and
    not kept.

    Levels are smaller pages of the same form and the same proportions. The
    size of a pixel is what OME or Aperio say; else, what the coordinates say,
    if there are any, and the resolution tags, if there are none.

    Args:
        path: The file.
        nodata: A pixel is invalid where all channels have this value. The
            default is the file's own, as GDAL writes it.
        indexed: Read the indices of a palette, not its colours.

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
        self._levels = self._open()
        self._last = 0
        picture = self._levels[0].picture
        page = picture.page
        alphas = _alpha_samples(page)
        self._channels = [s for s in range(picture.samples) if s not in alphas]
        self._alphas = alphas
        self._colours = None if indexed else _palette(page)
        self._fill = _nodata(page, picture.dtype)
        if nodata is None:
            nodata = self._fill
        try:
            check_nodata(path, nodata, picture.dtype)
        except ValueError:
            self.close()
            raise
        paletted = self._colours is not None
        place = read_georeference(path)
        self.meta = RasterMeta(
            height=picture.height,
            width=picture.width,
            channels=3 if paletted else len(self._channels),
            dtype=np.dtype(np.uint8) if paletted else picture.dtype,
            nodata=nodata,
            has_alpha=bool(alphas)
            or any(level.mask is not None for level in self._levels),
            nbytes_resident=_nbytes(self._levels),
            block_rows=picture.block_rows,
            georeference=place,
            level_sizes=tuple(
                (level.picture.height, level.picture.width)
                for level in self._levels
            ),
            mpp=_mpp(self._file, page, place),
        )

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self._file is None or self._pid != os.getpid():
            self._levels = self._open()
        if level != self._last:
            for page in self._levels[self._last].pages:
                page.forget()
            self._last = level
        picture, mask = self._levels[level]
        with naming(self.path, _DAMAGED), _quiet():
            stored = picture.read(window, self._fill)
            opacities = [stored[..., sample] for sample in self._alphas]
            if mask is not None:
                opacities.append(mask.read(window, None)[..., 0])
        pixels = stored
        if self._alphas:
            pixels = np.take(stored, self._channels, axis=-1)
        valid = valid_pixels(pixels, self.meta.nodata, opacities)
        if valid is None and not self.meta.all_valid:
            valid = np.ones(pixels.shape[:2], bool)
        if self._colours is not None:
            pixels = self._colours[pixels[..., 0]]
        return np.ascontiguousarray(pixels), valid

    def _open(self) -> list[_Level]:
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
                series = self._file.series[0].levels
                page = series[0].keyframe
                is_stack = series[0].size != page.size or page.imagedepth != 1
            if is_stack:
                raise ValueError(
                    f'{self.path}: is a stack of shape {series[0].shape}, not '
                    'one picture; save the pictures one by one, or as channels'
                )
            problem = _unsupported(page)
            if problem is not None:
                raise Unsupported(f'{self.path}: {problem}')
            with naming(self.path, _DAMAGED), _quiet():
                masks = [p for p in self._file.pages if p.subfiletype & _MASK]
                return [
                    _Level(Page(level), _mask_of(level, masks))
                    for level in [page, *_smaller(page, series[1:])]
                ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        super().close()
        self._levels = []
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, '_file': None, '_levels': []}


def check_complete(path: Path) -> None:
    """Make sure that every block of a file was written, in full.

    Raises:
        OSError: The file cannot be read.
        ValueError: Blocks are missing.
    """
    with TiffReader(path) as reader:
        page = reader._levels[0].picture.page
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
    raw_ycbcr = page.photometric == _YCBCR and page.compression not in JPEG
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


def _smaller(page: Any, series: Any) -> list[Any]:
    """The pages that are smaller versions of one.

    Args:
        page: of the full resolution.
        series: of tifffile, one for each level that it takes for such.
    """
    found: list[Any] = []
    for other in series:
        small, last = other.keyframe, (found or [page])[-1]
        if (
            small.samplesperpixel == page.samplesperpixel
            # JPEG may have its colours so at one level and so at another.
            and _kind(small) == _kind(page)
            and small.dtype == page.dtype
            and _alpha_samples(small) == _alpha_samples(page)
            and _same_palette(small, page)
            and (small.imagedepth, other.size) == (1, small.size)
            and is_level(_size(page), _size(small))
            and max(_size(small)) < max(_size(last))
            and _unsupported(small) is None
        ):
            found.append(small)
    return found


def _kind(page: Any) -> int:
    """What the values mean: JPEG of either colours is read as RGB."""
    return _RGB if page.photometric == _YCBCR else int(page.photometric)


def _size(page: Any) -> tuple[int, int]:
    return page.imagelength, page.imagewidth


def _mask_of(page: Any, masks: list[Any]) -> Page | None:
    """The page by which GDAL says what is valid in another, if any."""
    for mask in masks:
        if _size(mask) == _size(page):
            return Page(mask)
    return None


def _nbytes(levels: list[_Level]) -> int:
    """What is kept: tables of all levels, and blocks of one."""
    return sum(
        page.nbytes_tables for level in levels for page in level.pages
    ) + max(
        sum(page.nbytes_blocks for page in level.pages) for level in levels
    )


def _mpp(file: Any, page: Any, place: Georeference | None) -> Mpp | None:
    """Micrometres per pixel, down and across, if anything says so."""
    mpp = mpp_of_ome(file.ome_metadata) or mpp_of_aperio(page.description)
    if mpp is None and place is not None and place.crs is not None:
        return mpp_of_georeference(place)
    return mpp or mpp_of_tags(*map(page.tags.valueof, _RESOLUTION))


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


def _same_palette(page: Any, other: Any) -> bool:
    colours, others = _palette(page), _palette(other)
    if colours is None or others is None:
        return colours is others
    return np.array_equal(colours, others)


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
