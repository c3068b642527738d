# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Readers by window: what they promise, and how to get one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np

from . import gdal, npy, picture, tiff
from .meta import RasterMeta
from .window import Window


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
    path: str | Path, nodata: float | None = None, indexed: bool = False
) -> RasterReader:
    """Open a raster, in the format that its first bytes tell.

    Args:
        path: A TIFF or BigTIFF, a NumPy file, a virtual raster or JPEG 2000
            (through GDAL), or a picture that OpenCV decodes (PNG, JPEG, BMP,
            WebP and more).
        nodata: A pixel is invalid where all channels have this value. The
            default is what the file says itself.
        indexed: Read the indices of a TIFF with a palette, not its colours.

    Returns:
        A reader, to be used in a ``with`` block or to be closed.

    Raises:
        OSError: The file is not there, is a directory, or cannot be read.
        ValueError: It is damaged, not a raster, or of a kind that is not
            supported; or ``nodata`` is no value of its type.
    """
    path = Path(path)
    with path.open('rb') as file:
        head = file.read(64)
    if not head:
        raise ValueError(f'{path}: is empty; copy or download it again')
    if head.startswith(tiff.MAGIC):
        return tiff.TiffReader(path, nodata, indexed)
    if head.startswith(npy.MAGIC):
        return npy.NpyReader(path, nodata)
    if gdal.is_for_gdal(head):
        return gdal.GdalReader(path, nodata)
    return picture.PictureReader(path, nodata)
