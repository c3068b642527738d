# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Draw annotations as a mask: ``python .../annotations.py RASTER SHAPES OUT``.

SHAPES is GeoJSON or a GeoPackage (or what else GDAL reads), in any coordinate
reference system; or GeoJSON of QuPath, in pixels of the full resolution. OUT
is a GeoTIFF of class indices on the pixels of RASTER. Where areas overlap, the
smaller one is on top.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np

    from infsa_seg.apis import cli
    from infsa_seg.apis.converters import IGNORED, strips_of_rows, warn
    from infsa_seg.apis.progress import progress
    from infsa_seg.raster import (
        Georeference,
        GeoTiffWriter,
        RasterReader,
        open_raster,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'annotations.py: error: {error}')

AREAS = ('Polygon', 'MultiPolygon')
# Of RFC 7946, which knows no other; older files name theirs.
LONGITUDE_LATITUDE = 'OGC:CRS84'


class Shapes(NamedTuple):
    """Features of a file.

    Args:
        geometries: shapely's, in an array.
        names: of the class of each; None if it has none.
        crs: as GDAL takes it, empty if the file does not say; None if they
            are in pixels for sure.
    """

    geometries: np.ndarray
    names: list[str | None]
    crs: str | None


def read_shapes(path: Path, key: str, layer: str | None) -> Shapes:
    """Read features and the names of their classes.

    Args:
        path: GeoJSON, or what GDAL reads.
        key: property that names the class. QuPath has its own.
        layer: of a file of several; the first by default.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or has no features or no such property.
    """
    with path.open('rb') as file:
        head = file.read(512).lstrip(b'\xef\xbb\xbf \t\r\n')
    # QuPath writes a bare list where it is not asked for a collection.
    if head[:1] in (b'{', b'['):
        shapes = _read_geojson(path, key)
    else:
        shapes = _read_with_gdal(path, key, layer)
    if not len(shapes.geometries):
        raise ValueError(f'{path}: has no features')
    return shapes


def _read_geojson(path: Path, key: str) -> Shapes:
    import json

    from shapely.geometry import shape

    try:
        content = json.loads(path.read_text('utf-8-sig'))
        if isinstance(content, dict):
            crs = (content.get('crs') or {}).get('properties', {}).get('name')
            features = content.get('features', [content])
        else:
            crs, features = None, content
        features = [f for f in features if f.get('geometry')]
        found = [f.get('properties') or {} for f in features]
        geometries = [shape(f['geometry']) for f in features]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f'{path}: is no GeoJSON of features: {error}'
        ) from error
    quoted = {f.get('type') for f in features} - {'Feature'}
    if quoted:
        raise ValueError(f'{path}: has a {quoted.pop()} in place of features')
    if any(_is_of_qupath(f) for f in found):
        names = [(f.get('classification') or {}).get('name') for f in found]
        return Shapes(_array(geometries), names, None)
    if features and not any(key in f for f in found):
        raise _lacks(path, key, {name for f in found for name in f})
    names = [_text(f.get(key)) for f in found]
    return Shapes(_array(geometries), names, crs or LONGITUDE_LATITUDE)


def _is_of_qupath(properties: dict[str, Any]) -> bool:
    return 'objectType' in properties or isinstance(
        properties.get('classification'), dict
    )


def _read_with_gdal(path: Path, key: str, layer: str | None) -> Shapes:
    import pyogrio.raw
    import shapely

    try:
        meta, _, geometries, fields = pyogrio.raw.read(
            path, layer=layer, force_2d=True
        )
    except (pyogrio.errors.DataSourceError, ValueError) as error:
        raise ValueError(
            f'{path}: cannot be read as features: {error}'
        ) from error
    if key not in meta['fields']:
        raise _lacks(path, key, set(meta['fields']))
    here = [geometry is not None for geometry in geometries]
    values = fields[list(meta['fields']).index(key)]
    names = [_text(v) for v, h in zip(values, here, strict=True) if h]
    return Shapes(shapely.from_wkb(geometries[here]), names, meta['crs'] or '')


def _lacks(path: Path, key: str, others: set[str]) -> ValueError:
    return ValueError(
        f'{path}: no feature has the property {key!r}; choose one of '
        f'{", ".join(sorted(others)) or "none"} with --property'
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _array(items: list[Any]) -> np.ndarray:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def to_pixels(
    geometries: np.ndarray, crs: str, place: Georeference | None, path: Path
) -> np.ndarray:
    """Geometries in columns and rows of a raster.

    Args:
        geometries: in ``crs``.
        crs: as GDAL takes it.
        place: where the raster lies.
        path: of the raster, for errors.

    Raises:
        ValueError: Either has no coordinate reference system, or one does
            not lead to the other.
    """
    import rasterio
    import shapely
    from rasterio.crs import CRS
    from rasterio.warp import transform_geom

    if place is None or place.transform is None or place.crs is None:
        raise ValueError(
            f'{path}: does not say where on earth it lies; use --pixels if '
            'the annotations are in pixels'
        )
    if not crs:
        raise ValueError(
            'the annotations do not say their coordinate reference system; '
            'use --pixels if they are in pixels, else set it'
        )
    try:
        source, target = CRS.from_user_input(crs), CRS.from_wkt(place.crs)
        if source != target:
            shapes = [shapely.geometry.mapping(g) for g in geometries]
            geometries = _array(
                [
                    shapely.geometry.shape(moved)
                    for moved in transform_geom(source, target, shapes)
                ]
            )
        if not np.isfinite(shapely.total_bounds(geometries)).all():
            raise ValueError('some lie where it has no coordinates')
    except (
        ValueError,
        rasterio.errors.RasterioError,
        rasterio._err.CPLE_BaseError,
    ) as error:
        raise ValueError(
            f'{path}: annotations in {crs[:40]} cannot be moved onto it: '
            f'{error}'
        ) from error
    a, b, c, d, e, f = tuple(~rasterio.Affine(*place.transform))[:6]
    return shapely.transform(
        geometries,
        lambda xy: xy @ np.array([[a, d], [b, e]]) + np.array([c, f]),
    )


def draw(
    reader: RasterReader,
    geometries: np.ndarray,
    values: np.ndarray,
    background: int,
    writer: GeoTiffWriter,
) -> None:
    """Draw areas from top to bottom, the smaller ones over the larger ones.

    A pixel belongs to an area if its centre does.

    Args:
        reader: the raster; its pixels are not read.
        geometries: areas in columns and rows.
        values: uint8, of each area.
        background: of pixels in no area.
        writer: of the mask, as large as the raster.
    """
    import shapely
    from rasterio.features import rasterize
    from rasterio.transform import Affine

    largest_first = np.argsort(-shapely.area(geometries), kind='stable')
    geometries, values = geometries[largest_first], values[largest_first]
    tree = shapely.STRtree(geometries)
    for strip in progress(list(strips_of_rows(reader)), 'rows'):
        stop = strip.row + strip.height
        box = shapely.box(0, strip.row, strip.width, stop)
        here = np.sort(tree.query(box))
        pixels = np.full((strip.height, strip.width), background, np.uint8)
        if len(here):
            rasterize(
                zip(geometries[here], values[here].tolist(), strict=True),
                out=pixels,
                transform=Affine.translation(0, strip.row),
            )
        writer.write(strip.row, pixels)


def convert(args: argparse.Namespace) -> None:
    """Read the annotations, and draw them on the pixels of the raster."""
    import shapely

    background = IGNORED
    if args.background is not None:
        if args.background not in args.classes:
            raise ValueError(
                f'--background: {args.background!r} is none of --classes'
            )
        background = args.classes.index(args.background)
    shapes = read_shapes(args.annotations, args.property, args.layer)
    with open_raster(args.raster) as reader:
        meta = reader.meta
        chosen = _choose(shapes, args)
        geometries = shapes.geometries[chosen]
        names = [shapes.names[index] for index in chosen]
        if shapes.crs is not None and not args.pixels:
            geometries = to_pixels(
                geometries, shapes.crs, meta.georeference, args.raster
            )
        # By their boxes: outlines that cross themselves are no obstacle.
        left, top, right, bottom = shapely.bounds(geometries).T
        inside = (left < meta.width) & (top < meta.height)
        inside &= (right > 0) & (bottom > 0)
        if not inside.any():
            raise ValueError(
                f'{args.annotations}: all of its areas lie outside '
                f'{args.raster}; is it of another image, or in pixels '
                '(--pixels)?'
            )
        if not inside.all():
            warn(
                f'{args.annotations}: {np.count_nonzero(~inside)} of '
                f'{len(inside)} areas lie outside {args.raster}'
            )
        values = np.array([args.classes.index(n) for n in names], np.uint8)
        with GeoTiffWriter(
            args.out,
            meta.height,
            meta.width,
            class_names=args.classes,
            nodata=IGNORED,
            overwrite=args.overwrite,
            georeference=meta.georeference,
        ) as writer:
            draw(
                reader, geometries[inside], values[inside], background, writer
            )
    print(args.out)


def _choose(shapes: Shapes, args: argparse.Namespace) -> list[int]:
    """Which features are areas of a class."""
    kinds = [g.geom_type for g in shapes.geometries]
    areas = [
        index
        for index, (kind, geometry) in enumerate(
            zip(kinds, shapes.geometries, strict=True)
        )
        if kind in AREAS and not geometry.is_empty
    ]
    if len(areas) < len(kinds):
        warn(
            f'{args.annotations}: {len(kinds) - len(areas)} of {len(kinds)} '
            'features are points, lines or empty, and are left out'
        )
    others = Counter(
        shapes.names[index]
        for index in areas
        if shapes.names[index] not in args.classes
    )
    if others:
        text = ', '.join(
            f'{name or "no class"} ({count})'
            for name, count in others.most_common(5)
        )
        if not args.leave_others:
            raise ValueError(
                f'{args.annotations}: has areas of {text}; add them to '
                '--classes, or use --leave-others'
            )
        warn(f'{args.annotations}: areas of {text} are left out')
    return [index for index in areas if shapes.names[index] in args.classes]


def class_list(value: str) -> list[str]:
    """An argument such as ``ground,tree``."""
    names = [name.strip() for name in value.split(',')]
    if not all(names) or len(set(names)) < len(names) or len(names) > 255:
        raise argparse.ArgumentTypeError(
            f'{value!r} is no list of different classes such as ground,tree'
        )
    return names


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description='Draw annotations as a mask on the pixels of a raster; '
        'where areas overlap, the smaller one is on top'
    )
    parser.add_argument('raster', type=Path, help='the image')
    parser.add_argument(
        'annotations',
        type=Path,
        help='GeoJSON, a GeoPackage, or GeoJSON of QuPath',
    )
    parser.add_argument('out', type=Path, help='the mask, a GeoTIFF')
    parser.add_argument(
        '--classes',
        type=class_list,
        required=True,
        metavar='NAME,...',
        help='in the order of their indices, from 0 on',
    )
    parser.add_argument(
        '--background',
        metavar='NAME',
        help='the class of pixels in no area; by default they are 255, '
        'ignored',
    )
    parser.add_argument(
        '--property',
        default='class',
        metavar='NAME',
        help='what names the class of a feature; defaults to class. QuPath '
        'has its own',
    )
    parser.add_argument(
        '--layer', metavar='NAME', help='of a GeoPackage; the first if not set'
    )
    parser.add_argument(
        '--pixels',
        action='store_true',
        help='coordinates are columns and rows, as those of QuPath are',
    )
    parser.add_argument(
        '--leave-others',
        action='store_true',
        help='leave out areas of other classes, or of none',
    )
    parser.add_argument(
        '--overwrite', action='store_true', help='replace a file that exists'
    )
    return parser.parse_args()


def main() -> None:
    """Read the arguments and convert."""
    args = parse()
    try:
        convert(args)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{args.annotations}: needs {error.name}; run '
            "pip install 'infsa_seg[raster]'"
        ) from error


if __name__ == '__main__':
    cli.run(main)
