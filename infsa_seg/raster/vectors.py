# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Polygons of a class map, written while its rows come in."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .georeference import Georeference
from .hidden import HiddenWriter, hidden_files, reserve
from .polygons import BandPolygons, Polygons
from .vector_files import (
    Features,
    GeoJsonFile,
    GeoPackageFile,
    QuPathFile,
    VectorFile,
)

_SUFFIXES = ('.geojson', '.json', '.gpkg')
# Pixels of a band, and the least rows of one: what is found in a band is held
# at once, and the joining of bands has a cost of its own.
_BAND_PIXELS = 2**21
_BAND_ROWS = 64


class PolygonWriter(HiddenWriter):
    """Writes the polygons of a class map from consecutive rows.

    ``with PolygonWriter(...) as writer:`` writes to a hidden file beside
    ``path``, and renames it when the block ends. If it ends in any other way
    the hidden file is removed, and ``path`` is as it was.

    A polygon is a set of pixels of one class that hang together by their
    edges; where only corners meet there are two. Polygons are written as
    soon as they are complete. ``num_open`` is how many are kept as they
    touch the last row; a map may be of any height. ``num_written`` is how
    many are in the file.

    Formats, by the suffix of ``path``:

    - ``.gpkg``, a GeoPackage of one layer, in any coordinate reference
      system. Fields ``class``, ``class_id`` and the area.
    - ``.geojson`` or ``.json``, the same as GeoJSON in the coordinates of
      the raster. The reference system is named in the member ``crs``, as
      GDAL does; it needs a code, such as EPSG:32632.
    - the same suffixes with ``slide``: annotations for QuPath in pixels of
      the full resolution, with classes and colours.

    The area is called ``area_m2`` (square metres) if the coordinate
    reference system is projected, else ``area_um2`` (square micrometres) if
    ``mpp`` is known, else ``area_px`` (square pixels of the full
    resolution). It is that of the pixels, before ``simplify``.

    Coordinates are those of the georeference if it has a transform. Else,
    so also if it has control points only, they are pixels: x = column,
    y = row, (0, 0) being the upper left corner of the first. Exteriors run
    counter-clockwise for who takes y as pointing up.

    Args:
        path: Where the file belongs. Its directory is made if need be.
        width: Columns of the map.
        class_names: Names of the classes.
        palette: One (red, green, blue) per class; for QuPath.
        georeference: Where on earth the full resolution lies.
        slide: Write annotations for QuPath, whatever the georeference.
        scale: Pixels of the full resolution per pixel of the map, or (down,
            across).
        min_area: In the unit of the area. Holes that are smaller are filled,
            then polygons that are smaller are left out. All that lies in a
            hole is smaller than the hole.
        simplify: How far an edge may move, in units of the coordinates.
            Each polygon stays valid; neighbours may come to overlap, or to
            have gaps between them. 0 leaves all as it is.
        nodata: The value of pixels of no class.
        background: Classes of which no polygons are made.
        mpp: Micrometres per pixel of the full resolution, down and across.
        overwrite: Whether ``path`` may exist; it is replaced at the end.
        metadata: Kept with the file, by name.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is not set.
        OSError: The directory cannot be written to.
        ValueError: A setting does not fit, the coordinate reference system
            cannot be named in GeoJSON, or a library is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        width: int,
        class_names: Sequence[str],
        palette: Sequence[tuple[int, int, int]],
        georeference: Georeference | None = None,
        slide: bool = False,
        scale: float | tuple[float, float] = 1.0,
        min_area: float = 0.0,
        simplify: float = 0.0,
        nodata: int | None = None,
        background: Sequence[int] = (),
        mpp: tuple[float, float] | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.width, self.num_written = width, 0
        self._suffix = self.path.suffix.lower()
        down, across = scale if isinstance(scale, tuple) else (scale, scale)
        self._min_area, self._simplify = min_area, simplify
        self._num_classes = len(class_names)
        self._check(palette, slide, (down, across), nodata, background, mpp)
        # Of which values polygons are made; those without a name are found
        # out when they occur.
        self._is_written = np.ones(2**16, bool)
        for label in (*background, *(() if nodata is None else (nodata,))):
            self._is_written[label] = False
        self._band: np.ndarray | None = None
        # The number of the first row in it, and how many there are.
        self._start, self._filled = 0, 0
        self._polygons = BandPolygons(width)
        self._file: VectorFile | None = None
        # GDAL wants to see the suffix of a GeoPackage.
        end = self._suffix if self._suffix == '.gpkg' else ''
        self._part = reserve(self.path, overwrite, end)
        try:
            with self._naming():
                crs, unit = self._place(
                    None if slide else georeference, (down, across), mpp
                )
                if slide:
                    self._file = QuPathFile(
                        *(self._part, self.path.stem, class_names),
                        *(palette, metadata or {}),
                    )
                else:
                    kind = (
                        GeoPackageFile
                        if self._suffix == '.gpkg'
                        else GeoJsonFile
                    )
                    self._file = kind(
                        *(self._part, self.path.stem, class_names),
                        *(f'area_{unit}', crs, metadata or {}),
                    )
        except BaseException:
            self.abort()
            raise

    @property
    def num_open(self) -> int:
        """Polygons that are kept, as they may go on in the next row."""
        return self._polygons.num_open

    def write(self, row: int, classes: np.ndarray) -> None:
        """Append rows.

        Args:
            row: Number of the first of them. Rows between those written and
                this one are of no class.
            classes: uint8 or uint16 (rows, width), any number of rows, always
                of the same type.

        Raises:
            OSError: The disk is full, or writing failed otherwise.
            ValueError: The rows come too late, are of another form or type,
                or have a class without a name.
        """
        following = self._start + self._filled
        if row < following:
            raise ValueError(
                f'{self.path}: row {row} cannot be written after '
                f'{following} rows'
            )
        if self._band is None and classes.dtype in (np.uint8, np.uint16):
            rows = max(_BAND_PIXELS // self.width, _BAND_ROWS)
            self._band = np.empty((rows, self.width), classes.dtype)
        dtype = self._band.dtype if self._band is not None else 'uint8'
        form = classes.shape[1:], classes.dtype
        if self._band is None or form != ((self.width,), dtype):
            raise ValueError(
                f'{self.path}: has rows of ({self.width},) {dtype}, not '
                f'{form[0]} {form[1]}'
            )
        if row > following:
            self._flush()
            self._start = row
        while len(classes):
            taken = min(len(self._band) - self._filled, len(classes))
            self._band[self._filled : self._filled + taken] = classes[:taken]
            classes = classes[taken:]
            self._filled += taken
            if self._filled == len(self._band):
                self._flush()

    def close(self) -> None:
        """Complete the file and put it in its place.

        Raises:
            OSError: The disk is full, or writing failed otherwise. Nothing
                is left of the file then.
            ValueError: The last rows have a class without a name.
        """
        if self._file is None:
            return
        try:
            self._flush()
            with self._naming():
                for polygons in self._polygons.finish():
                    self._append(polygons)
                self._file.close()
            self._file = None
            self._part.replace(self.path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up: remove what was written, and leave ``path`` as it was."""
        file, self._file = self._file, None
        if file is not None:
            file.abort()
        for part in hidden_files(self.path, os.getpid()):
            part.unlink(missing_ok=True)

    def _check(
        self,
        palette: Sequence[tuple[int, int, int]],
        slide: bool,
        scale: tuple[float, float],
        nodata: int | None,
        background: Sequence[int],
        mpp: tuple[float, float] | None,
    ) -> None:
        """Refuse settings that do not fit."""
        problem = None
        if self._suffix not in _SUFFIXES:
            problem = f'polygons are written to {", ".join(_SUFFIXES)}'
        elif slide and self._suffix == '.gpkg':
            problem = 'QuPath opens no .gpkg; use .geojson'
        elif self.width < 1:
            problem = f'a map of {self.width} columns is empty'
        elif len(palette) != self._num_classes:
            problem = (
                f'{len(palette)} colours are not one for each of '
                f'{self._num_classes} classes'
            )
        elif not 0 < self._num_classes <= 2**16:
            problem = f'{self._num_classes} classes are not 1 to 65536'
        elif not all(size > 0 for size in (*scale, *(mpp or ()))):
            problem = f'scale={scale} and mpp={mpp} must be positive'
        elif not (self._min_area >= 0 and self._simplify >= 0):
            problem = (
                f'min_area={self._min_area} and simplify={self._simplify} '
                'must not be negative'
            )
        elif nodata is not None and not 0 <= nodata < 2**16:
            problem = f'nodata={nodata} is no value of uint8 or uint16'
        elif not all(0 <= i < self._num_classes for i in background):
            problem = (
                f'background={tuple(background)} has numbers that are none '
                f'of {self._num_classes} classes'
            )
        if problem is not None:
            raise ValueError(f'{self.path}: {problem}')

    def _place(
        self,
        georeference: Georeference | None,
        scale: tuple[float, float],
        mpp: tuple[float, float] | None,
    ) -> tuple[str | None, str]:
        """Find out where pixels lie, and how large they are.

        Returns:
            The coordinate reference system, and the unit of areas.
        """
        crs, unit, area = None, 'px', 1.0
        transform = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        if mpp is not None:
            unit, area = 'um2', mpp[0] * mpp[1]
        if georeference is not None and georeference.transform is not None:
            crs, transform = georeference.crs, georeference.transform
            if georeference.pixel_area is not None:
                unit, area = 'm2', georeference.pixel_area
        down, across = scale
        a, b, c, d, e, f = transform
        self._transform = a * across, b * down, c, d * across, e * down, f
        self._pixel_area = area * down * across
        return crs, unit

    def _flush(self) -> None:
        """Find the polygons of the rows at hand."""
        if self._band is None or not self._filled:
            return
        band = self._band[: self._filled]
        valid = self._is_written[band]
        largest = int(band.max(initial=0, where=valid))
        if largest >= self._num_classes:
            row, col = np.argwhere((band == largest) & valid)[0].tolist()
            raise ValueError(
                f'{self.path}: class {largest} at row {self._start + row}, '
                f'column {col} is none of {self._num_classes} classes'
            )
        with self._naming():
            for polygons in self._polygons.add(self._start, band, valid):
                self._append(polygons)
        self._start += self._filled
        self._filled = 0

    def _append(self, polygons: Polygons) -> None:
        """Write polygons that are complete."""
        import shapely

        areas = polygons.ring_areas() * self._pixel_area
        is_hole = np.ones(len(areas), bool)
        is_hole[polygons.offsets[:-1]] = False
        rings = ~is_hole | (areas >= self._min_area)
        areas = np.add.reduceat(
            np.where(is_hole, -areas, areas) * rings, polygons.offsets[:-1]
        )
        kept = areas >= self._min_area
        polygons, areas = polygons.take(kept, rings), areas[kept]
        if not len(polygons) or self._file is None:
            return
        a, b, c, d, e, f = self._transform
        col, row = polygons.points.T
        shapes = shapely.from_ragged_array(
            shapely.GeometryType.POLYGON,
            np.stack([a * col + b * row + c, d * col + e * row + f], 1),
            (polygons.ring_offsets, polygons.offsets),
        )
        # The same points first, however the map was cut. This makes
        # exteriors clockwise.
        shapes = shapely.reverse(shapely.normalize(shapes))
        keys = shapely.get_coordinates(
            shapely.get_point(shapely.get_exterior_ring(shapes), 0)
        )
        if self._simplify:
            shapes = shapely.simplify(shapes, self._simplify)
        self._file.append(Features(shapes, polygons.classes, areas, keys))
        self.num_written += len(shapes)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn errors of libraries into lines that name the file."""
        try:
            import pyogrio  # noqa: F401 (to know before any work)
            import rasterio
            import shapely  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f'{self.path}: polygons need rasterio, shapely and pyogrio; '
                "run pip install 'infsa_seg[raster]'"
            ) from error
        try:
            yield
        except ValueError as error:
            raise ValueError(f'{self.path}: {error}') from error
        except (
            OSError,
            RuntimeError,
            rasterio.errors.RasterioError,
            rasterio._err.CPLE_BaseError,
        ) as error:
            cause = getattr(error, 'strerror', None) or str(error)
            cause = cause.splitlines()[0]
            if shutil.disk_usage(self.path.parent).free < 2**20:
                raise OSError(
                    errno.ENOSPC, 'the disk is full', str(self.path)
                ) from error
            raise OSError(
                getattr(error, 'errno', None) or errno.EIO,
                f'cannot be written: {cause}; is there space left?',
                str(self.path),
            ) from error
