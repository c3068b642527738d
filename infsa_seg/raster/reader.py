# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Readers by window: what they promise, and how to get one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np

from . import gdal, npy, picture, slide, tiff
from .base import Unsupported
from .meta import RasterMeta
from .window import Window

# Names of readers, which are those of the libraries that they use.
READERS = ('auto', 'tifffile', 'rasterio', 'openslide', 'opencv', 'numpy')


@runtime_checkable
class RasterReader(Protocol):
    """A raster of any size that is read by window.

    It is for one thread at a time. It may be pickled, and used after a fork:
    each process opens the file by itself, on the first read.
    """

    @property
    def meta(self) -> RasterMeta:
        """Size, channels, type, and what may be invalid."""
        ...

    def read(self, window: Window, level: int = 0) -> np.ndarray:
        """Read pixels.

        Args:
            window: What to read, in pixels of the level; it must lie within
                the picture.
            level: Of ``meta.level_sizes``, 0 being the full resolution.

        Returns:
            (height, width, channels) in the file's own type; three channels
            of a colour picture are red, green, blue. Alpha is left out. The
            array is contiguous and belongs to the caller.

        Raises:
            OSError: The file cannot be read.
            ValueError: The window leaves the picture, there is no such level,
                or the file is damaged: never a part of the pixels.
        """
        ...

    def read_valid(self, window: Window, level: int = 0) -> np.ndarray | None:
        """Tell which pixels are valid.

        Asked right after :meth:`read` of the same window, it decodes nothing.

        Args:
            window: As for :meth:`read`.
            level: As for :meth:`read`.

        Returns:
            bool (height, width), the caller's own: False where all channels
            equal nodata, where any is NaN, and where alpha is 0. None if no
            pixel of the file can be invalid.

        Raises:
            OSError: The file cannot be read.
            ValueError: As for :meth:`read`.
        """
        ...

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        ...

    def __enter__(self) -> RasterReader: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_raster(
    path: str | Path,
    nodata: float | None = None,
    indexed: bool = False,
    reader: str = 'auto',
) -> RasterReader:
    """Open a raster, in the format that its content tells.

    Args:
        path: A TIFF or BigTIFF, a NumPy file, a virtual raster or JPEG 2000
            (through GDAL), a slide of a microscope (through OpenSlide), or a
            picture that OpenCV decodes (PNG, JPEG, BMP, WebP and more).
        nodata: A pixel is invalid where all channels have this value. The
            default is what the file says itself.
        indexed: Read the indices of a TIFF with a palette, not its colours;
            of other files, too, if ``reader`` is ``rasterio``.
        reader: One of :data:`READERS`. With ``auto``, a TIFF goes to
            OpenSlide if a maker of slides wrote it, and to GDAL if tifffile
            does not support its colours or its compression. With another,
            that one reads the file, or says that it cannot.

    Returns:
        A reader, to be used in a ``with`` block or to be closed.

    Raises:
        OSError: The file is not there, is a directory, or cannot be read.
        ValueError: It is damaged, not a raster, or of a kind that is not
            supported; ``nodata`` is no value of its type; or there is no such
            ``reader``.
    """
    path = Path(path)
    if reader not in READERS:
        raise ValueError(
            f'{path}: there is no reader {reader!r}; use one of '
            + ', '.join(READERS)
        )
    with path.open('rb') as file:
        head = file.read(132)
    if not head:
        raise ValueError(f'{path}: is empty; copy or download it again')
    name = _choose(path, head) if reader == 'auto' else reader
    for other, magic, kind in (
        ('tifffile', tiff.MAGIC, 'TIFF'),
        ('numpy', npy.MAGIC, 'NumPy file'),
    ):
        if name == other and not head.startswith(magic):
            raise ValueError(
                f"{path}: is no {kind}; use reader='auto' or another"
            )
    if name == 'opencv' and head.startswith(tiff.MAGIC):
        raise ValueError(
            f'{path}: OpenCV leaves out channels of a TIFF; use '
            "reader='tifffile' or reader='rasterio'"
        )
    if name == 'tifffile':
        try:
            return tiff.TiffReader(path, nodata, indexed)
        except Unsupported as error:
            if reader != 'auto':
                raise
            return _through_gdal(path, nodata, indexed, error)
    if name == 'rasterio':
        return gdal.GdalReader(path, nodata, indexed)
    if name == 'openslide':
        return slide.SlideReader(path, nodata)
    if name == 'numpy':
        return npy.NpyReader(path, nodata)
    return picture.PictureReader(path, nodata)


def _choose(path: Path, head: bytes) -> str:
    """The reader for a file with these first bytes."""
    if head.startswith(npy.MAGIC):
        return 'numpy'
    if gdal.is_for_gdal(head):
        return 'rasterio'
    if slide.vendor_of(path) is not None:
        return 'openslide'
    if head.startswith(tiff.MAGIC):
        return 'tifffile'
    if head[128:] == b'DICM':
        raise ValueError(
            f'{path}: is DICOM, but no slide that OpenSlide knows, or '
            'openslide is not installed; convert it to TIFF'
        )
    return 'opencv'


def _through_gdal(
    path: Path, nodata: float | None, indexed: bool, error: Unsupported
) -> RasterReader:
    """GDAL's reader, if it knows what tifffile does not."""
    try:
        reader = gdal.GdalReader(path, nodata, indexed)
    except (OSError, ValueError):
        raise error from None
    return reader
