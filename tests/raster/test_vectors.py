# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import errno
import itertools
import json
import os
import subprocess
import sys
import uuid
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsa_seg.raster import (
    ControlPoint,
    Georeference,
    PolygonWriter,
    vector_files,
    vectors,
)
from infsa_seg.raster.polygons import BandPolygons
from infsa_seg.raster.rings import cut, pack

features = pytest.importorskip('rasterio.features')
pyogrio = pytest.importorskip('pyogrio')
shapely = pytest.importorskip('shapely')
from rasterio.crs import CRS  # noqa: E402 (it may be missing)

NAMES = ['field', 'wäre', 'a "c"', 'd']
PALETTE = [(1, 2, 3), (40, 50, 60), (7, 8, 9), (255, 255, 255)]
UTM = CRS.from_epsg(32632).to_wkt()
FEET = CRS.from_epsg(2263).to_wkt()  # US survey feet
# Of no authority.
CUSTOM = CRS.from_proj4('+proj=laea +lat_0=12 +lon_0=3 +datum=WGS84').to_wkt()
NORTH_UP = Georeference(UTM, (10.0, 0.0, 5e5, 0.0, -10.0, 6e6))


def example(text):
    """A map written with one digit per pixel."""
    rows = text.split()
    return np.array([[int(c) for c in row] for row in rows], np.uint8)


# Holes that touch each other and the exterior at corners; parts that meet
# far below, above, and both; rings in rings.
TOUCHING = example('11111 10111 11010 10101 11111')
COMBS = example('1010101 1010101 1110111 0010100 1011101 1010101 1111101')
NESTED = example('1111111 1000001 1022201 1020201 1022201 1000001 1111111')
CORNERS = example('0110 1001 1001 0110 1010 0101')
MAPS = [TOUCHING, COMBS, NESTED, CORNERS, example('1'), example('12 21')]


def reference(classes, valid=None):
    """Class and outline of the polygons of a whole map, by rasterio."""
    found = features.shapes(classes, mask=valid, connectivity=4)
    return outlines(
        (int(label), shapely.geometry.shape(shape)) for shape, label in found
    )


def outlines(polygons):
    """What can be compared of (class, polygon)."""
    return sorted(
        (label, shapely.to_wkb(shapely.normalize(polygon)))
        for label, polygon in polygons
    )


def polygons_of(bands, width):
    """(class, polygon) of (row, classes, valid), band by band."""
    finder = BandPolygons(width)
    for found in itertools.chain(
        *(finder.add(*band) for band in bands), finder.finish()
    ):
        shapes = shapely.from_ragged_array(
            shapely.GeometryType.POLYGON,
            found.points,
            (found.ring_offsets, found.offsets),
        )
        yield from zip(found.classes.tolist(), shapes, strict=True)
    assert finder.num_open == 0


def bands_of(classes, cuts, valid=None):
    valid = np.ones(classes.shape, bool) if valid is None else valid
    bounds = [0, *sorted(cuts), len(classes)]
    for start, stop in itertools.pairwise(bounds):
        yield start, classes[start:stop], valid[start:stop]


@st.composite
def cut_maps(draw):
    """A map, its validity, and where it is cut."""
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes = random.integers(0, draw(st.integers(1, 3)), (height, width))
    classes = classes.astype(np.uint8)
    if draw(st.booleans()):
        classes = classes.repeat(2, 0).repeat(2, 1)
    share = draw(st.sampled_from([0, 0.1, 0.3]))
    cuts = draw(st.sets(st.integers(1, max(1, len(classes) - 1))))
    return (
        classes,
        random.random(classes.shape) >= share,
        {cut for cut in cuts if cut < len(classes)},
    )


@settings(max_examples=60)
@given(cut_maps())
def test_polygons_are_those_of_the_whole_map(cut_map):
    classes, valid, cuts = cut_map
    bands = bands_of(classes, cuts, valid)
    found = list(polygons_of(bands, classes.shape[1]))
    assert outlines(found) == reference(classes, valid)
    assert all(shapely.is_valid(polygon) for _, polygon in found)
    # No points but corners.
    for _, polygon in found:
        simple = shapely.simplify(polygon, 0)
        assert shapely.get_num_coordinates(
            polygon
        ) - shapely.get_num_coordinates(simple) in (0, 1)


@pytest.mark.parametrize('turned', [0, 1, 2, 3])
@pytest.mark.parametrize('classes', MAPS)
def test_every_cut_of_difficult_maps(classes, turned):
    classes = np.ascontiguousarray(np.rot90(classes, turned))
    expected = reference(classes)
    height, width = classes.shape
    for count in {1, height - 1}:
        for cuts in itertools.combinations(range(1, height), count):
            found = polygons_of(bands_of(classes, cuts), width)
            assert outlines(found) == expected, cuts


@pytest.mark.parametrize('first', range(4))
def test_a_ring_is_cut_wherever_it_begins(first):
    """Two pieces for two runs, none of them cut at the first point."""
    square = np.roll([[0, 0], [0, 9], [9, 9], [9, 0]], first, 0)
    ring = np.concatenate([square, square[:1]]).astype(float)
    starts, stops = np.array([2, 6]), np.array([4, 12])
    (pieces,) = cut(*pack([ring]), 0, starts, stops)
    assert {tuple(map(tuple, piece.tolist())) for piece in pieces} == {
        ((6, 0), (4, 0)),
        ((2, 0), (0, 0), (0, 9), (9, 9), (9, 0)),
    }


@pytest.fixture
def small_bands(monkeypatch):
    """Make the writer take bands of three rows."""
    monkeypatch.setattr(vectors, '_BAND_PIXELS', 1)
    monkeypatch.setattr(vectors, '_BAND_ROWS', 3)


def write(path, classes, step=None, row=0, **settings):
    settings = {'class_names': NAMES, 'palette': PALETTE} | settings
    with PolygonWriter(path, classes.shape[1], **settings) as writer:
        step = step or max(1, len(classes))
        for start in range(0, len(classes), step):
            writer.write(row + start, classes[start : start + step])
    assert os.listdir(path.parent) == [path.name]
    return writer


def read_json(path):
    """The whole, and of each feature its properties and polygon."""
    whole = json.loads(path.read_text(encoding='utf-8'))
    assert whole['type'] == 'FeatureCollection'
    assert all(f['type'] == 'Feature' for f in whole['features'])
    return whole, [
        (f['properties'], shapely.geometry.shape(f['geometry']))
        for f in whole['features']
    ]


def read_package(path):
    """As of :func:`read_json`; the whole is what pyogrio tells."""
    meta, _, shapes, columns = pyogrio.raw.read(path)
    names = meta['fields'].tolist()
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return pyogrio.read_info(path), [
        (dict(zip(names, row, strict=True)), shape)
        for row, shape in zip(rows, shapely.from_wkb(shapes), strict=True)
    ]


def by_class(found):
    return outlines((properties['class_id'], s) for properties, s in found)


def random_map(height=40, width=30, seed=0):
    random = np.random.default_rng(seed)
    classes = random.integers(0, 3, (height // 2, width // 2))
    return classes.repeat(2, 0).repeat(2, 1).astype(np.uint8)


@pytest.mark.parametrize('step', [1, 2, 7, 40])
def test_rows_may_come_in_any_number(tmp_path, small_bands, step):
    classes = random_map()
    writer = write(tmp_path / 'a.geojson', classes, step)
    whole, found = read_json(tmp_path / 'a.geojson')
    assert by_class(found) == reference(classes)
    assert writer.num_written == len(found)
    assert 'crs' not in whole
    for properties, polygon in found:
        assert properties == {
            'class': NAMES[properties['class_id']],
            'class_id': properties['class_id'],
            'area_px': polygon.area,
        }
        assert polygon.exterior.is_ccw
        assert not any(hole.is_ccw for hole in polygon.interiors)


def test_only_what_touches_the_border_is_kept(tmp_path, small_bands):
    """Isolated squares: a few per row of them, many in all."""
    height, width = 120, 40
    classes = np.zeros((height, width), np.uint8)
    for row in range(2, 6):
        classes[row::8, 1::4] = classes[row::8, 2::4] = 1
    squares = 15 * 10
    most = written = 0
    writer = PolygonWriter(
        tmp_path / 'a.geojson', width, NAMES, PALETTE, background=[0]
    )
    with writer:
        for row in range(0, height, 3):
            writer.write(row, classes[row : row + 3])
            most = max(most, writer.num_open)
            # All that lie above are in the file.
            written = writer.num_written + writer.num_open
            assert written == 10 * ((row + 2 + 6) // 8)
    assert (most, written, writer.num_written) == (10, squares, squares)
    _, found = read_json(tmp_path / 'a.geojson')
    assert by_class(found) == reference(classes, classes == 1)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_missing_rows_nodata_and_background(tmp_path, dtype):
    classes = np.ones((6, 4), dtype)
    classes[0] = 200
    classes[1, 1] = 3
    classes[5, 0] = 0
    with PolygonWriter(
        tmp_path / 'a.json', 4, NAMES, PALETTE, nodata=200, background=(3,)
    ) as writer:
        writer.write(10, classes[:3])
        writer.write(15, classes[3:])
    stored = np.full((18, 4), 200, np.uint8)
    stored[10:13], stored[15:] = classes[:3], classes[3:]
    _, found = read_json(tmp_path / 'a.json')
    valid = (stored != 200) & (stored != 3)
    assert by_class(found) == reference(stored, valid)
    assert len(found) == 3


def test_many_classes(tmp_path):
    classes = np.array([[256, 0, 299]], np.uint16)
    names = [str(i) for i in range(300)]
    write(tmp_path / 'a.json', classes, class_names=names, palette=names)
    _, found = read_json(tmp_path / 'a.json')
    assert by_class(found) == reference(classes)


def test_geopackage(tmp_path, small_bands, monkeypatch):
    """Also in a reference system that has no code, batch by batch."""
    monkeypatch.setattr(vector_files, '_APPENDED', 10)
    path, classes = tmp_path / 'map 1.gpkg', random_map()
    place = Georeference(CUSTOM, (2.0, 0.0, 100.0, 0.0, -2.0, 50.0))
    write(path, classes, 5, georeference=place, metadata={'MODEL': 'infvit'})
    info, found = read_package(path)
    assert CRS.from_wkt(info['crs']) == CRS.from_wkt(CUSTOM)
    assert info['layer_name'] == 'map 1'
    assert info['geometry_type'] == 'Polygon'
    assert info['features'] == len(found) == len(reference(classes))
    assert info['capabilities']['fast_spatial_filter']
    assert info['dataset_metadata']['MODEL'] == 'infvit'
    assert info['fields'].tolist() == ['class', 'class_id', 'area_m2']
    for properties, polygon in found:
        assert properties['class'] == NAMES[properties['class_id']]
        assert properties['area_m2'] == polygon.area
        assert polygon.exterior.is_ccw
    # Back to pixels.
    pixels = [
        (
            properties,
            shapely.transform(p, lambda xy: abs(xy - [100, 50]) / 2),
        )
        for properties, p in found
    ]
    assert by_class(pixels) == reference(classes)


def test_geojson_names_the_reference_system(tmp_path):
    path, classes = tmp_path / 'a.geojson', random_map()
    write(path, classes, georeference=NORTH_UP, metadata={'A': 'é'})
    whole, found = read_json(path)
    assert whole['metadata'] == {'A': 'é'}
    assert pyogrio.read_info(path)['crs'] == 'EPSG:32632'
    assert whole['crs']['properties']['name'] == 'urn:ogc:def:crs:EPSG::32632'
    assert sum(p['area_m2'] for p, _ in found) == classes.size * 100
    bounds = shapely.total_bounds([polygon for _, polygon in found])
    assert bounds.tolist() == [5e5, 6e6 - 400, 5e5 + 300, 6e6]
    assert all(polygon.exterior.is_ccw for _, polygon in found)


def test_a_rotated_map_of_half_the_resolution(tmp_path):
    """Coordinates are those of the full resolution; areas in feet."""
    path, classes = tmp_path / 'a.geojson', random_map()
    place = Georeference(FEET, (3.0, 1.0, 7e5, -1.0, 3.0, 2e5))
    write(path, classes, georeference=place, scale=(2.0, 4.0))
    _, found = read_json(path)
    corners = np.array([[3.0, 1.0], [-1.0, 3.0]]) * [4.0, 2.0]
    expected = [
        (label, shapely.transform(p, lambda xy: xy @ corners.T + [7e5, 2e5]))
        for label, p in polygons_of(bands_of(classes, []), 30)
    ]
    assert by_class(found) == outlines(expected)
    assert all(polygon.exterior.is_ccw for _, polygon in found)
    foot = 1200 / 3937
    for properties, polygon in found:
        assert properties['area_m2'] == pytest.approx(polygon.area * foot**2)


def test_degrees_have_areas_in_pixels(tmp_path):
    path, classes = tmp_path / 'a.geojson', random_map()
    wkt = CRS.from_epsg(4326).to_wkt()
    place = Georeference(wkt, (0.1, 0.0, 7.0, 0.0, -0.1, 50.0))
    write(path, classes, georeference=place, scale=2.0)
    whole, found = read_json(path)
    assert whole['crs']['properties']['name'] == (
        'urn:ogc:def:crs:OGC:1.3:CRS84'
    )
    assert pyogrio.read_info(path)['total_bounds'] == pytest.approx(
        (7.0, 42.0, 13.0, 50.0)
    )
    assert sum(p['area_px'] for p, _ in found) == classes.size * 4


@pytest.mark.parametrize('suffix', ['.geojson', '.gpkg'])
def test_control_points_leave_pixels(tmp_path, suffix):
    path, classes = tmp_path / f'a{suffix}', random_map()
    points = (ControlPoint(0, 0, 7.0, 50.0, 0.0, '1'),)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        place = Georeference(None, None, points, UTM)
        write(path, classes, georeference=place)
    read = read_json if suffix == '.geojson' else read_package
    info, found = read(path)
    assert info.get('crs') is None
    assert by_class(found) == reference(classes)


@pytest.mark.parametrize(
    'wkt',
    [
        CUSTOM,
        # Not quite EPSG:25832, which has a datum.
        CRS.from_proj4('+proj=utm +zone=32 +ellps=GRS80').to_wkt(),
    ],
)
def test_geojson_needs_a_code(tmp_path, wkt):
    path = tmp_path / 'a.geojson'
    place = Georeference(wkt, NORTH_UP.transform)
    with pytest.raises(ValueError, match=f'{path}: .* use .gpkg') as caught:
        write(path, random_map(), georeference=place)
    assert '\n' not in str(caught.value)
    assert not os.listdir(tmp_path)


def test_annotations_of_a_slide(tmp_path, small_bands):
    path, classes = tmp_path / 'a.geojson', random_map()
    write(path, classes, slide=True, scale=(4.0, 8.0), georeference=NORTH_UP)
    whole, found = read_json(path)
    assert 'crs' not in whole
    expected = [
        (label, shapely.transform(polygon, lambda xy: xy * [8, 4]))
        for label, polygon in polygons_of(bands_of(classes, []), 30)
    ]
    names = [p['classification']['name'] for p, _ in found]
    labels = [NAMES.index(name) for name in names]
    polygons = [polygon for _, polygon in found]
    assert outlines(zip(labels, polygons, strict=True)) == outlines(expected)
    for label, (properties, _) in zip(labels, found, strict=True):
        assert properties == {
            'objectType': 'annotation',
            'classification': {
                'name': NAMES[label],
                'color': list(PALETTE[label]),
            },
        }
    ids = [feature['id'] for feature in whole['features']]
    assert len({uuid.UUID(i) for i in ids}) == len(ids)
    # The same ones, and the same points, however the rows come.
    text = set(path.read_text().replace('}},\n', '}}\n').splitlines())
    vectors._BAND_ROWS = 50
    write(path, classes, slide=True, scale=(4.0, 8.0), overwrite=True)
    again = path.read_text().replace('}},\n', '}}\n').splitlines()
    assert set(again) == text


@pytest.mark.parametrize(
    ('name', 'settings'),
    [
        ('a.geojson', {}),
        ('a.json', {'slide': True}),
        ('a.gpkg', {'georeference': NORTH_UP}),
        ('A.GPKG', {}),
    ],
)
def test_a_map_without_polygons(tmp_path, name, settings):
    path = tmp_path / name
    classes = np.full((5, 4), 255, np.uint8)
    write(path, classes, nodata=255, **settings)
    read = read_json if 'json' in name else read_package
    assert read(path)[1] == []
    # Nor are rows needed.
    write(path, classes[:0], overwrite=True, **settings)
    assert read(path)[1] == []


HOLES = example(
    """
    0000000000
    0111111110
    0122111110
    0122133110
    0111131110
    0111111110
    0000000000
    0000000030
    """
)


@pytest.mark.parametrize(
    ('least', 'settings'),
    [
        (4, {}),
        (4 * 32, {'scale': (4.0, 8.0)}),
        (4 * 32 * 0.125, {'scale': (4.0, 8.0), 'mpp': (0.5, 0.25)}),
        (400, {'georeference': NORTH_UP}),
        (400, {'georeference': NORTH_UP, 'mpp': (0.5, 0.25)}),
    ],
)
def test_small_polygons_and_holes_are_left_out(
    tmp_path, small_bands, least, settings
):
    """The 3s go, and the hole that they leave; the four 2s stay."""
    path, unit = tmp_path / 'a.gpkg', least / 4
    write(path, HOLES, min_area=least, **settings)
    _, found = read_package(path)
    assert sorted(
        (p['class_id'], list(p.values())[2] / unit, len(s.interiors))
        for p, s in found
    ) == [(0, 39, 1), (1, 36, 1), (2, 4, 0)]
    write(path, HOLES, min_area=least * 1.01, overwrite=True, **settings)
    _, found = read_package(path)
    assert sorted(
        (p['class_id'], list(p.values())[2] / unit, len(s.interiors))
        for p, s in found
    ) == [(0, 39, 1), (1, 40, 0)]


def test_a_ring_is_judged_with_its_hole_filled(tmp_path):
    classes = example('0000000 0111000 0121000 0111000 0000000')
    write(tmp_path / 'a.json', classes, min_area=9)
    _, found = read_json(tmp_path / 'a.json')
    assert sorted((p['class_id'], p['area_px']) for p, _ in found) == [
        (0, 26.0),
        (1, 9.0),
    ]


def test_simplified(tmp_path):
    """Steps of a slope become a line; the area is that of the pixels."""
    size = 40
    classes = np.tri(size, dtype=np.uint8)
    path = tmp_path / 'a.json'
    write(path, classes, georeference=NORTH_UP, simplify=10.0)
    _, found = read_json(path)
    assert len(found) == 2
    for properties, polygon in found:
        assert len(polygon.exterior.coords) < 8
        assert polygon.is_valid
        assert polygon.exterior.is_ccw
        pixels = (classes == properties['class_id']).sum()
        assert properties['area_m2'] == pixels * 100
        assert polygon.area == pytest.approx(pixels * 100, rel=0.05)


@pytest.mark.parametrize(
    ('name', 'settings', 'words'),
    [
        ('a.shp', {}, r'\.geojson, \.json, \.gpkg'),
        ('a.gpkg', {'slide': True}, r'QuPath .* use \.geojson'),
        ('a.json', {'palette': PALETTE[:2]}, '2 colours .* 4 classes'),
        ('a.json', {'class_names': [], 'palette': []}, '0 classes'),
        ('a.json', {'scale': (1.0, 0.0)}, 'positive'),
        ('a.json', {'mpp': (-1.0, 1.0)}, 'positive'),
        ('a.json', {'min_area': -1.0}, 'min_area=-1.0'),
        ('a.json', {'simplify': float('nan')}, 'simplify=nan'),
        ('a.json', {'nodata': -1}, 'nodata=-1'),
        ('a.json', {'background': [4]}, 'background'),
        ('a.json', {'width': 0}, '0 columns'),
    ],
)
def test_settings_that_do_not_fit(tmp_path, name, settings, words):
    settings = {
        'width': 4,
        'class_names': NAMES,
        'palette': PALETTE,
    } | settings
    with pytest.raises(ValueError, match=words) as caught:
        PolygonWriter(tmp_path / name, **settings)
    assert str(caught.value).startswith(f'{tmp_path / name}: ')
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ('row', 'classes', 'words'),
    [
        (1, np.zeros((1, 4), np.uint8), 'row 1 cannot .* after 2 rows'),
        (2, np.zeros((1, 3), np.uint8), r'\(4,\) uint8, not \(3,\) uint8'),
        (2, np.zeros((1, 4), np.uint16), r'uint8, not \(4,\) uint16'),
        (2, np.zeros((1, 4, 1), np.uint8), r'not \(4, 1\) uint8'),
        (3, np.array([[0, 7, 9, 9]], np.uint8), 'class 9 at row 3, column 2'),
    ],
)
@pytest.mark.parametrize('name', ['a.json', 'a.gpkg'])
def test_rows_that_do_not_fit(tmp_path, name, row, classes, words):
    path = tmp_path / name
    with (
        pytest.raises(ValueError, match=f'{path}: .*{words}'),
        PolygonWriter(path, 4, NAMES, PALETTE, nodata=7) as writer,
    ):
        writer.write(0, np.zeros((2, 4), np.uint8))
        writer.write(row, classes)
    assert not os.listdir(tmp_path)


def test_the_first_rows_must_be_of_a_type_of_classes(tmp_path):
    with (
        pytest.raises(ValueError, match=r'uint8, not .* float32'),
        PolygonWriter(tmp_path / 'a.json', 4, NAMES, PALETTE) as writer,
    ):
        writer.write(0, np.zeros((2, 4), np.float32))


@pytest.mark.parametrize('name', ['a.geojson', 'a.gpkg'])
def test_an_existing_file_is_kept_until_the_end(tmp_path, name):
    path, classes = tmp_path / name, random_map()
    path.write_text('precious')
    with pytest.raises(FileExistsError, match='exists; use --overwrite'):
        write(path, classes)
    with (
        pytest.raises(KeyError, match='ours'),
        PolygonWriter(path, 30, NAMES, PALETTE, overwrite=True) as writer,
    ):
        writer.write(0, classes)
        assert len(os.listdir(tmp_path)) > 1
        raise KeyError('ours')
    assert os.listdir(tmp_path) == [name]
    assert path.read_text() == 'precious'
    writer.close()
    assert path.read_text() == 'precious'
    write(path, classes, overwrite=True)
    read = read_json if name == 'a.geojson' else read_package
    assert by_class(read(path)[1]) == reference(classes)


def test_a_folder_is_no_target(tmp_path):
    path = tmp_path / 'a.json'
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        PolygonWriter(path, 4, NAMES, PALETTE, overwrite=True)


@pytest.mark.skipif(not os.path.isdir('/proc'), reason='has no /proc')
def test_a_place_that_cannot_be_written_to():
    path = '/proc/a.json'
    with pytest.raises(OSError, match='cannot be written') as caught:
        PolygonWriter(path, 4, NAMES, PALETTE)
    assert caught.value.filename == path


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = tmp_path / 'new' / 'a[1].gpkg'
    path.parent.mkdir()
    process = subprocess.Popen([sys.executable, '-c', ''])
    process.wait()
    names = [f'.a[1].gpkg.{process.pid}.part.gpkg{s}' for s in ('', '-wal')]
    for name in names:
        path.with_name(name).touch()
    write(path, random_map())


@pytest.mark.parametrize('free', [100, 2**30])
@pytest.mark.parametrize('name', ['a.geojson', 'a.gpkg'])
def test_a_full_disk_names_the_file(
    tmp_path, small_bands, monkeypatch, name, free
):
    resource = pytest.importorskip('resource')
    monkeypatch.setattr(vector_files, '_APPENDED', 10)
    usage = type('Usage', (), {'free': free})
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    path = tmp_path / name
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = PolygonWriter(path, 120, NAMES, PALETTE)
    try:
        with pytest.raises(OSError) as caught, writer:
            size = sum(part.stat().st_size for part in tmp_path.iterdir())
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (size + 20_000, limits[1])
            )
            writer.write(0, random_map(200, 120))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    if free == 100:
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.strerror == 'the disk is full'
    else:
        assert caught.value.strerror.startswith('cannot be written: ')
    assert '\n' not in caught.value.strerror
    assert not os.listdir(tmp_path)


def test_giving_up_needs_no_space(tmp_path, small_bands):
    resource = pytest.importorskip('resource')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = PolygonWriter(tmp_path / 'a.json', 4, NAMES, PALETTE)
    try:
        with pytest.raises(KeyError, match='ours'), writer:
            # Something waits to be written.
            writer.write(0, np.zeros((6, 4), np.uint8))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            raise KeyError('ours')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('library', ['rasterio', 'shapely', 'pyogrio'])
def test_a_missing_library_is_named(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"pip install 'infsa_seg\[raster"):
        PolygonWriter(tmp_path / 'a.json', 4, NAMES, PALETTE)
    assert not os.listdir(tmp_path)
