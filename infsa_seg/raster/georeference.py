# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where on earth a raster lies."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Affine = tuple[float, float, float, float, float, float]


@dataclasses.dataclass(frozen=True)
class ControlPoint:
    """A pixel whose place is known.

    Attributes:
        row, col: in pixels, 0 being the upper left corner of the first.
        x, y, z: in the coordinate reference system.
        name: as in the file.
    """

    row: float
    col: float
    x: float
    y: float
    z: float
    name: str


@dataclasses.dataclass(frozen=True)
class Georeference:
    """Coordinates of pixels, in whichever ways a file has them.

    Attributes:
        crs: coordinate reference system as WKT, or None.
        transform: (a, b, c, d, e, f) with x = a col + b row + c and
            y = d col + e row + f, (0, 0) being the upper left corner of the
            first pixel; None if there is none.
        points: ground control points.
        points_crs: of the points, as WKT, or None.
        rpcs: rational polynomial coefficients by GDAL's names. They hold for
            the pixels of the file itself.
    """

    crs: str | None = None
    transform: Affine | None = None
    points: tuple[ControlPoint, ...] = ()
    points_crs: str | None = None
    rpcs: tuple[tuple[str, str], ...] = ()

    def coarsened(self, row: int, col: int, factor: int) -> Georeference:
        """That of a raster whose pixels stand for squares of this one's.

        Args:
            row, col: pixel at which its first square begins.
            factor: side of a square in pixels.
        """
        transform = None
        if self.transform is not None:
            a, b, c, d, e, f = self.transform
            c, f = c + a * col + b * row, f + d * col + e * row
            transform = (
                *(a * factor, b * factor, c),
                *(d * factor, e * factor, f),
            )
        points = tuple(
            dataclasses.replace(
                point,
                row=(point.row - row) / factor,
                col=(point.col - col) / factor,
            )
            for point in self.points
        )
        # Their polynomials are of the pixels as they are.
        return dataclasses.replace(
            self, transform=transform, points=points, rpcs=()
        )

    def resized(
        self, height: int, width: int, new_height: int, new_width: int
    ) -> Georeference:
        """That of a raster of the same extent in another resolution.

        The corners stay where they are. So do the polynomials, which count
        from the centre of the first pixel and not from its corner: an offset
        of x pixels becomes (x + 1/2) s - 1/2, and a scale s times as large.

        Args:
            height, width: of this one's raster in pixels.
            new_height, new_width: of the other.

        Raises:
            ValueError: An offset or a scale of the polynomials is no number.
        """
        transform = None
        if self.transform is not None:
            a, b, c, d, e, f = self.transform
            transform = (
                *(a * width / new_width, b * height / new_height, c),
                *(d * width / new_width, e * height / new_height, f),
            )
        points = tuple(
            dataclasses.replace(
                point,
                row=point.row * new_height / height,
                col=point.col * new_width / width,
            )
            for point in self.points
        )
        rpcs = dict(self.rpcs)
        for axis, growth in (
            ('LINE', new_height / height),
            ('SAMP', new_width / width),
        ):
            for name, shift in ((f'{axis}_OFF', 0.5), (f'{axis}_SCALE', 0.0)):
                if name in rpcs:
                    value = (_number(name, rpcs[name]) + shift) * growth
                    rpcs[name] = repr(value - shift)
        return dataclasses.replace(
            self,
            transform=transform,
            points=points,
            rpcs=tuple(sorted(rpcs.items())),
        )

    @property
    def pixel_area(self) -> float | None:
        """Square metres of a pixel; None where they are not all alike.

        That is without a transform, and in degrees.
        """
        if self.transform is None or self.crs is None:
            return None
        from rasterio.crs import CRS

        crs = CRS.from_wkt(self.crs)
        if not crs.is_projected:
            return None
        metres = float(crs.linear_units_factor[1])
        a, b, _, d, e, _ = self.transform
        return abs(a * e - b * d) * metres**2

    def write_to(self, dataset: Any) -> None:
        """Give a rasterio dataset, open for writing, the same coordinates."""
        from rasterio.control import GroundControlPoint
        from rasterio.crs import CRS
        from rasterio.rpc import RPC
        from rasterio.transform import Affine

        if self.transform is not None:
            dataset.transform = Affine(*self.transform)
            if self.crs is not None:
                dataset.crs = CRS.from_wkt(self.crs)
        if self.points:
            points = [
                GroundControlPoint(p.row, p.col, p.x, p.y, p.z, p.name)
                for p in self.points
            ]
            crs = self.points_crs and CRS.from_wkt(self.points_crs)
            dataset.gcps = (points, crs or CRS())
        if self.rpcs:
            dataset.rpcs = RPC.from_gdal(dict(self.rpcs))


def _number(name: str, text: str) -> float:
    """The value of a coefficient, behind which some files have its unit."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        raise ValueError(f'RPC {name}={text!r} is no number') from None


def georeference_of(dataset: Any) -> Georeference | None:
    """The coordinates of an open rasterio dataset; None if it has none."""
    transform = None
    if not dataset.transform.is_identity:
        transform = tuple(dataset.transform)[:6]
    points, points_crs = dataset.gcps
    rpcs: Mapping[str, str] = dataset.tags(ns='RPC')
    found = Georeference(
        dataset.crs.to_wkt() if dataset.crs else None,
        transform,
        tuple(
            ControlPoint(p.row, p.col, p.x, p.y, p.z or 0.0, str(p.id))
            for p in points
        ),
        points_crs.to_wkt() if points_crs else None,
        tuple(sorted(rpcs.items())),
    )
    return None if found == Georeference() else found


def read_georeference(path: Path) -> Georeference | None:
    """The coordinates of a file; None if it has none that GDAL can read.

    Args:
        path: of any format.
    """
    try:
        with quiet_gdal() as rasterio, rasterio.open(path) as dataset:
            return georeference_of(dataset)
    except ImportError:
        return None
    # It is read by other means; GDAL need not know it.
    except Exception:
        return None


@contextmanager
def quiet_gdal() -> Iterator[Any]:
    """Use rasterio without its remarks on what has no coordinates."""
    import rasterio
    import rasterio.windows

    with warnings.catch_warnings():
        warnings.simplefilter(
            'ignore', rasterio.errors.NotGeoreferencedWarning
        )
        yield rasterio
