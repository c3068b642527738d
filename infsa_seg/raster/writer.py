# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster that is written from top to bottom, and appears when complete."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .base import check_nodata
from .georeference import Georeference
from .hidden import HiddenWriter, reserve, sidecar
from .layout import (
    create_options,
    level_factors,
    level_sizes,
    resolution_tags,
)
from .overviews import (
    BUILD_NBYTES,
    build_overviews,
    check_levels,
    copy_as_cog,
)
from .tiff import check_complete

# What GDAL may keep of any number of blocks.
_CACHE_NBYTES = 64 * 2**20
# Micrometres whose inverse is a fraction of 32 bits with six digits.
_LEAST_MPP, _MOST_MPP = 1e-5, 1e7
_LEAST_COG_TILE = 128
_COMPRESSIONS = ('deflate', 'lzw', 'zstd', 'none')


class GeoTiffWriter(HiddenWriter):
    """Writes a tiled, compressed TIFF from consecutive rows.

    ``with GeoTiffWriter(...) as writer:`` writes to a hidden file beside
    ``path``, and renames it when the block ends with all rows written. If it
    ends in any other way the hidden file is removed, and ``path`` is as it
    was. Rows are gathered to rows of tiles: each tile is written once.

    ``nbytes_resident`` is what the writer may hold in memory: one row of
    tiles, and GDAL's cache of blocks, which is capped. On the disk it takes
    what :func:`output_nbytes` says, at most, unless pixels do not compress.

    A pixel of a class map is the index of its class, at every level. With a
    palette OpenSlide shows the colours of the classes, as QGIS does; without
    one it shows grey. It shows three channels of uint8 as colours, reduces
    integers of 16 bits to 8, and cannot read wider ones and floats.

    A coordinate reference system that GeoTIFF cannot express lies in
    ``<path>.aux.xml``, where GDAL looks for it.

    Args:
        path: Where the file belongs. Its directory is made if need be.
        height: Rows in pixels.
        width: Columns in pixels.
        channels: Values per pixel.
        dtype: Type of the values. float16 is kept as such in a file that
            readers open as float32, of half the size.
        palette: One (red, green, blue) per class, at most 256; for one
            channel of uint8. Viewers show the classes in these colours.
        class_names: Names of the classes, kept as JSON in the tag
            ``CLASS_NAMES``.
        nodata: The value of pixels that are not valid.
        compress: ``'deflate'``, ``'lzw'``, ``'zstd'`` or ``'none'``.
        tile: Side of a tile in pixels, a multiple of 16, and at least
            128 for COG.
        overwrite: Whether ``path`` may exist; it is replaced at the end.
        metadata: More tags, by name.
        georeference: Where on earth it lies.
        pyramid: Whether to add overviews, each of half the height and width
            by nearest neighbour, until the longer side is at most 512 or one
            tile. They are made when the file is closed, block by block.
        mpp: Micrometres per pixel, down and across; kept as pixels per
            centimetre in the tags of resolution, in single precision.
        cog: Whether the file is to be a cloud-optimised GeoTIFF, overviews
            included. It is copied when it is closed: until then the disk
            holds it twice.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is not set.
        OSError: The directory cannot be written to.
        ValueError: A setting does not fit, or rasterio or tifffile is not
            installed.
    """

    def __init__(
        self,
        path: str | Path,
        height: int,
        width: int,
        channels: int = 1,
        dtype: npt.DTypeLike = np.uint8,
        palette: Sequence[tuple[int, int, int]] | None = None,
        class_names: Sequence[str] | None = None,
        nodata: float | None = None,
        compress: str = 'deflate',
        tile: int = 256,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        georeference: Georeference | None = None,
        pyramid: bool = False,
        mpp: tuple[float, float] | None = None,
        cog: bool = False,
    ) -> None:
        self.path = Path(path)
        self.height, self.width, self.channels = height, width, channels
        self.dtype = np.dtype(dtype)
        self._cog = cog
        self._check(palette, nodata, compress, tile, mpp)
        self._sizes = [(height, width)]
        if pyramid or cog:
            self._sizes = level_sizes(height, width, tile)
        self._options = create_options(
            self._sizes, channels, self.dtype, nodata, compress, tile
        )
        self._dataset: Any = None
        self._part = reserve(self.path, overwrite)
        # What the rows are written to.
        self._rows = (
            self._part.with_suffix('.rows.part') if cog else self._part
        )
        rows = min(tile, height)
        # As GDAL takes it, and so that no tile is copied once more.
        self._buffer = np.empty((channels, rows, width), self.dtype)
        self._written = 0
        held = self._buffer.nbytes
        if pyramid or cog:
            held = max(held, BUILD_NBYTES)
        self.nbytes_resident = held + _CACHE_NBYTES
        tags = dict(metadata or {})
        if mpp is not None:
            tags |= resolution_tags(*mpp)
        if class_names is not None:
            tags['CLASS_NAMES'] = json.dumps(
                list(class_names), ensure_ascii=False
            )
        try:
            with self._gdal() as rasterio:
                self._dataset = rasterio.open(self._rows, 'w', **self._options)
                # Before any pixel: these come first in the file.
                if palette is not None:
                    self._dataset.write_colormap(
                        1, {i: (*rgb, 255) for i, rgb in enumerate(palette)}
                    )
                self._dataset.update_tags(**tags)
                if georeference is not None:
                    georeference.write_to(self._dataset)
        except BaseException:
            self.abort()
            raise

    def write(self, row: int, pixels: np.ndarray) -> None:
        """Append rows.

        Args:
            row: Number of the first of them, the one after those written.
            pixels: (rows, width) or (rows, width, channels), any number of
                rows, in the type of the file.

        Raises:
            OSError: The disk is full, or writing failed otherwise.
            ValueError: The rows are not the next ones, too many, or of
                another form or type.
        """
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        stop = row + len(pixels)
        if row != self._written or stop > self.height:
            raise ValueError(
                f'{self.path}: rows {row} to {stop} cannot be written after '
                f'{self._written} of {self.height} rows'
            )
        form = pixels.shape[1:], pixels.dtype
        if form != ((self.width, self.channels), self.dtype):
            raise ValueError(
                f'{self.path}: has rows of ({self.width}, {self.channels}) '
                f'{self.dtype}, not {form[0]} {form[1]}'
            )
        size = self._buffer.shape[1]
        while len(pixels):
            start = self._written % size
            taken = min(size - start, len(pixels))
            self._buffer[:, start : start + taken] = np.moveaxis(
                pixels[:taken], 2, 0
            )
            pixels = pixels[taken:]
            self._written += taken
            if start + taken == size or self._written == self.height:
                self._flush(start + taken)

    def close(self) -> None:
        """Complete the file and put it in its place.

        Raises:
            OSError: The disk is full, or writing failed otherwise.
            ValueError: Rows are missing. Nothing is left of the file then.
        """
        if self._dataset is None:
            return
        try:
            if self._written != self.height:
                raise ValueError(
                    f'{self.path}: only {self._written} of {self.height} '
                    'rows were written'
                )
            with self._gdal() as rasterio:
                self._dataset.close()
                self._dataset = None
                # Its place is GDAL's now.
                self._buffer = np.empty((0, 1, 0), self.dtype)
                self._complete(rasterio)
            aside, place = sidecar(self._part), sidecar(self.path)
            # What is there belongs to the file that is replaced.
            place.unlink(missing_ok=True)
            if aside.exists():
                aside.replace(place)
            self._part.replace(self.path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up: remove what was written, and leave ``path`` as it was."""
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            # It flushes, which may fail again; the file is not wanted.
            with contextlib.suppress(Exception):
                dataset.close()
        for part in (self._part, self._rows):
            part.unlink(missing_ok=True)
            sidecar(part).unlink(missing_ok=True)

    def _check(
        self,
        palette: Sequence[tuple[int, int, int]] | None,
        nodata: float | None,
        compress: str,
        tile: int,
        mpp: tuple[float, float] | None,
    ) -> None:
        if min(self.height, self.width, self.channels) < 1:
            raise ValueError(
                f'{self.path}: a raster of {self.height}x{self.width} pixels '
                f'with {self.channels} channels is empty'
            )
        if compress not in _COMPRESSIONS:
            raise ValueError(
                f'{self.path}: compress={compress!r} is unknown; use one of '
                f'{_COMPRESSIONS}'
            )
        if tile < 16 or tile % 16:
            raise ValueError(
                f'{self.path}: tile={tile} must be a multiple of 16'
            )
        if self._cog and tile < _LEAST_COG_TILE:
            raise ValueError(
                f'{self.path}: tile={tile} is too small for COG; use '
                f'{_LEAST_COG_TILE} or more'
            )
        if self.dtype.kind not in 'uif':
            raise ValueError(
                f'{self.path}: GeoTIFF has no type {self.dtype}; use an '
                'integer, float32 or float64'
            )
        if mpp is not None and not all(
            _LEAST_MPP <= value <= _MOST_MPP for value in mpp
        ):
            raise ValueError(
                f'{self.path}: mpp={mpp} must be two numbers of micrometres '
                f'from {_LEAST_MPP:g} to {_MOST_MPP:g}'
            )
        check_nodata(self.path, nodata, self.dtype)
        indexed = self.channels == 1 and self.dtype == np.uint8
        if palette is not None and not (indexed and len(palette) <= 256):
            raise ValueError(
                f'{self.path}: a palette is for one channel of uint8 and has '
                f'at most 256 colours, not {len(palette)} for '
                f'{self.channels} of {self.dtype}'
            )

    def _complete(self, rasterio: Any) -> None:
        """Add what is made of all rows, and see that nothing is missing."""
        tile = self._options['blockxsize']
        factors = level_factors(self.height, self.width, tile)
        if len(self._sizes) > 1:
            build_overviews(rasterio, self._rows, factors)
        self._check_blocks(self._rows)
        if self._cog:
            copy_as_cog(rasterio, self._rows, self._part, self._options)
            self._check_blocks(self._part)

    def _check_blocks(self, path: Path) -> None:
        # GDAL keeps it to itself if the last blocks found no space.
        try:
            check_complete(path)
            check_levels(path, self._sizes)
        except ValueError as error:
            raise self._failure('blocks are missing') from error

    def _flush(self, rows: int) -> None:
        """Write what the buffer has of a row of tiles."""
        start = self._written - rows
        with self._gdal() as rasterio:
            self._dataset.write(
                np.ascontiguousarray(
                    self._buffer[:, :rows], self._options['dtype']
                ),
                window=rasterio.windows.Window(0, start, self.width, rows),
            )

    @contextmanager
    def _gdal(self) -> Iterator[Any]:
        """Use rasterio with our cache, its errors as ours."""
        try:
            import rasterio
            import rasterio.enums
            import rasterio.shutil
            import rasterio.windows
            import tifffile  # noqa: F401 (to know before any work)
        except ImportError as error:
            raise ValueError(
                f'{self.path}: GeoTIFF needs rasterio and tifffile; run '
                "pip install 'infsa_seg[raster]'"
            ) from error
        try:
            with (
                warnings.catch_warnings(),
                rasterio.Env(GDAL_CACHEMAX=_CACHE_NBYTES),
            ):
                # Pictures without coordinates are no mistake.
                warnings.simplefilter(
                    'ignore', rasterio.errors.NotGeoreferencedWarning
                )
                yield rasterio
        except (
            rasterio.errors.RasterioError,
            rasterio._err.CPLE_BaseError,
        ) as error:
            cause = str(error.__cause__ or error).splitlines()[0]
            raise self._failure(cause) from error

    def _failure(self, cause: str) -> OSError:
        """The error to raise when GDAL could not write."""
        # It does not say which error of the system it met.
        if shutil.disk_usage(self.path.parent).free < 2**20:
            return OSError(errno.ENOSPC, 'the disk is full', str(self.path))
        return OSError(
            errno.EIO,
            f'cannot be written: {cause}; is there space left?',
            str(self.path),
        )
