# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is written lies where the source lay, in any way that files have it."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.raster import (
    ControlPoint,
    Georeference,
    GeoTiffWriter,
    Window,
    open_raster,
)

rasterio = pytest.importorskip('rasterio')
pytestmark = pytest.mark.filterwarnings(
    'ignore:Dataset has no geotransform', 'ignore:The given matrix'
)

from rasterio.control import GroundControlPoint  # noqa: E402
from rasterio.crs import CRS  # noqa: E402
from rasterio.transform import Affine  # noqa: E402

from infsa_seg.raster.georeference import georeference_of  # noqa: E402

PIXELS = np.arange(30 * 20, dtype=np.uint16).reshape(30, 20)
NORTH_UP = Affine(0.5, 0, 440720.0, 0, -0.5, 3751320.0)
CUSTOM = (
    'PROJCS["mine",GEOGCS["sphere",DATUM["d",SPHEROID["s",6371000,0]],'
    'PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433]],'
    'PROJECTION["Mercator_1SP"],PARAMETER["central_meridian",7],'
    'PARAMETER["scale_factor",1],PARAMETER["false_easting",0],'
    'PARAMETER["false_northing",0],UNIT["metre",1]]'
)
POINTS = [
    GroundControlPoint(0, 0, 100.0, 50.0, 3.0, 'a'),
    GroundControlPoint(0, 20, 110.0, 51.0, 0.0, 'b'),
    GroundControlPoint(30, 0, 99.0, 40.0, 1.0, 'c'),
]
RPC = {
    **{f'{axis}_OFF': '10' for axis in ('LINE', 'SAMP', 'LAT', 'LONG')},
    **{f'{axis}_SCALE': '5' for axis in ('LINE', 'SAMP', 'LAT', 'LONG')},
    **{'HEIGHT_OFF': '100', 'HEIGHT_SCALE': '500'},
    **{
        f'{part}_COEFF': ' '.join(map(str, range(1, 21)))
        for part in ('LINE_NUM', 'LINE_DEN', 'SAMP_NUM', 'SAMP_DEN')
    },
}
CASES = {
    'code': dict(crs=CRS.from_epsg(32633), transform=NORTH_UP),
    'custom': dict(crs=CRS.from_wkt(CUSTOM), transform=NORTH_UP),
    'no crs': dict(transform=NORTH_UP),
    'rotated': dict(
        crs=CRS.from_epsg(3857),
        transform=Affine.translation(9, 8) * Affine.rotation(30),
    ),
    'points': dict(gcps=(POINTS, CRS.from_epsg(4326))),
    'polynomials': dict(rpcs=RPC),
    'nothing': {},
}


def make(path, crs=None, transform=None, gcps=None, rpcs=None):
    with rasterio.open(
        path, 'w', 'GTiff', 20, 30, 1, crs, transform, np.uint16
    ) as dataset:
        dataset.write(PIXELS, 1)
        if gcps:
            dataset.gcps = gcps
        if rpcs:
            dataset.update_tags(ns='RPC', **rpcs)
    return path


def where(path):
    with rasterio.open(path) as dataset:
        points, crs = dataset.gcps
        return (
            dataset.crs,
            dataset.transform,
            [(p.row, p.col, p.x, p.y, p.z) for p in points],
            crs,
            dataset.rpcs and dataset.rpcs.to_gdal(),
        )


@pytest.mark.parametrize('case', CASES)
def test_round_trip(tmp_path, case):
    source = make(tmp_path / 'a.tif', **CASES[case])
    out = tmp_path / 'b.tif'
    with open_raster(source) as reader:
        place = pickle.loads(pickle.dumps(reader)).meta.georeference
        with GeoTiffWriter(out, 30, 20, georeference=place) as writer:
            writer.write(0, PIXELS.astype(np.uint8))
    assert (place is None) == (case == 'nothing')
    assert where(out) == where(source)


@pytest.mark.parametrize('case', ['code', 'rotated', 'points'])
def test_coarsened(tmp_path, case):
    """The corner of each square is where that of its first pixel is."""
    source = make(tmp_path / 'a.tif', **CASES[case])
    with open_raster(source) as reader:
        place = reader.meta.georeference.coarsened(4, 2, 8)
    with GeoTiffWriter(tmp_path / 'b.tif', 3, 2, georeference=place) as file:
        file.write(0, np.zeros((3, 2), np.uint8))
    crs, fine, points, *_ = where(source)
    other, coarse, moved, *_ = where(tmp_path / 'b.tif')
    assert crs == other
    for row, col in ((0, 0), (3, 2)):
        at = fine * (2 + 8 * col, 4 + 8 * row)
        assert coarse * (col, row) == pytest.approx(at) or case == 'points'
    for before, after in zip(points, moved, strict=True):
        assert after[:2] == ((before[0] - 4) / 8, (before[1] - 2) / 8)
        assert after[2:] == before[2:]


# GeoTIFF can express the first, and not the others.
ODD = (
    'PROJCS["odd",GEOGCS["WGS 84",DATUM["WGS_1984",'
    'SPHEROID["WGS 84",6378137,298.257223563]],PRIMEM["Greenwich",0],'
    'UNIT["degree",0.0174532925199433]],PROJECTION["Transverse_Mercator"],'
    'PARAMETER["latitude_of_origin",1.25],'
    'PARAMETER["central_meridian",10.3333],'
    'PARAMETER["scale_factor",0.99987],PARAMETER["false_easting",12345.678],'
    'PARAMETER["false_northing",-987.6],UNIT["metre",1]]'
)
ROTATED_POLE = '+proj=ob_tran +o_proj=longlat +o_lon_p=0 +o_lat_p=30 +lon_0=9'
PLACES = {
    'code': Georeference(
        CRS.from_epsg(32633).to_wkt(), (0.5, 0.0, 4e5, 0.0, -0.5, 5e6)
    ),
    'custom': Georeference(
        CRS.from_wkt(ODD).to_wkt(), (2.0, 0.0, 1e5, 0.0, -3.0, 2e5)
    ),
    'beyond GeoTIFF': Georeference(
        CRS.from_string(f'{ROTATED_POLE} +R=6371000').to_wkt(),
        (0.1, 0.0, 3.0, 0.0, -0.1, 4.0),
    ),
    'no crs': Georeference(None, (0.5, 0.0, 4.0, 0.0, -0.5, 5.0)),
    'rotated': Georeference(
        CRS.from_epsg(3857).to_wkt(), (0.8, 0.6, 9.0, 0.6, -0.8, 8.0)
    ),
    'points': Georeference(
        points=(
            ControlPoint(0.0, 0.0, 100.0, 50.0, 3.0, 'a'),
            ControlPoint(0.5, 4.0, 110.0, 51.0, 0.0, 'b'),
            ControlPoint(1.0, 0.0, 99.0, 40.0, 1.0, 'c'),
        ),
        points_crs=CRS.from_epsg(4326).to_wkt(),
    ),
    'polynomials': Georeference(rpcs=tuple(sorted(RPC.items()))),
    'nothing': None,
}
FORMS = [{}, {'pyramid': True}, {'cog': True}]
SIZES = [(1, 1), (1, 5), (17, 300), (257, 511)]


@pytest.mark.parametrize(
    ('size', 'place', 'form'),
    [
        *itertools.product(SIZES, PLACES, FORMS),
        *(
            pytest.param((4097, 9215), 'rotated', form, marks=pytest.mark.slow)
            for form in FORMS
        ),
    ],
)
def test_what_is_written_lies_in_its_place(tmp_path, size, place, form):
    pixels = np.arange(size[0] * size[1]).reshape(size) * 7 % 251
    pixels = pixels.astype(np.uint8)
    path = tmp_path / 'a.tif'
    with GeoTiffWriter(
        path, *size, georeference=PLACES[place], **form
    ) as writer:
        for row in range(0, size[0], 100):
            writer.write(row, pixels[row : row + 100])
    with rasterio.open(path) as file:
        assert np.array_equal(file.read(1), pixels)
        found = georeference_of(file)
    assert _numbers(found) == _numbers(PLACES[place])
    names = {file.name for file in tmp_path.iterdir()}
    aside = {'a.tif.aux.xml'} if place == 'beyond GeoTIFF' else set()
    assert names == {'a.tif'} | aside


def _numbers(place):
    """To compare: a coordinate reference system is what it does."""
    if place is None:
        return None
    crs, points_crs = (
        wkt and CRS.from_wkt(wkt) for wkt in (place.crs, place.points_crs)
    )
    # GDAL numbers points anew.
    points = [(p.row, p.col, p.x, p.y, p.z) for p in place.points]
    rpcs = {
        name: [float(number) for number in text.split()]
        for name, text in place.rpcs
        if not name.startswith('ERR')
    }
    return crs, place.transform, points, points_crs, rpcs


def test_what_lies_beside_a_file_is_replaced_with_it(tmp_path):
    def write(place):
        with GeoTiffWriter(
            tmp_path / 'a.tif', 1, 1, overwrite=True, georeference=place
        ) as writer:
            writer.write(0, np.zeros((1, 1), np.uint8))

    write(PLACES['beyond GeoTIFF'])
    write(PLACES['code'])
    assert [file.name for file in tmp_path.iterdir()] == ['a.tif']
    write(PLACES['beyond GeoTIFF'])
    with (
        pytest.raises(ValueError, match='only 0 of 9 rows'),
        GeoTiffWriter(
            tmp_path / 'a.tif',
            9,
            9,
            overwrite=True,
            georeference=PLACES['beyond GeoTIFF'],
        ),
    ):
        pass
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ['a.tif', 'a.tif.aux.xml']


numbers = st.floats(-1e7, 1e7).filter(lambda x: x == 0 or abs(x) > 1e-7)
lengths = st.integers(1, 10**6)


@given(st.tuples(*[numbers] * 6), *[lengths] * 4)
def test_resized(transform, height, width, new_height, new_width):
    """Corners and points of another resolution are where they were."""
    point = ControlPoint(height * 0.75, width * 0.25, 1.0, 2.0, 3.0, 'a')
    place = Georeference('crs', transform, (point,), 'other')
    other = place.resized(height, width, new_height, new_width)
    assert (other.crs, other.points_crs) == ('crs', 'other')
    size = max(map(abs, transform)) * max(height, width)
    for down, across in ((0, 0), (0, 1), (1, 0), (1, 1), (0.5, 0.125)):
        before = Affine(*transform) @ (across * width, down * height)
        after = Affine(*other.transform) @ (
            across * new_width,
            down * new_height,
        )
        assert after == pytest.approx(before, rel=1e-9, abs=1e-12 * size)
    (moved,) = other.points
    assert moved.row == pytest.approx(new_height * 0.75, rel=1e-12)
    assert moved.col == pytest.approx(new_width * 0.25, rel=1e-12)
    assert (moved.x, moved.y, moved.z, moved.name) == (1.0, 2.0, 3.0, 'a')


def test_resized_to_the_same_is_the_same():
    for place in filter(None, PLACES.values()):
        same = place.resized(30, 20, 30, 20)
        assert _numbers(same) == _numbers(place)


# Of a camera that looks down: sample and line depend on one angle each.
CAMERA = {
    **{'LINE_OFF': '512.5 pixels', 'LINE_SCALE': '500', 'LAT_OFF': '48'},
    **{'SAMP_OFF': '300.25', 'SAMP_SCALE': '400', 'LONG_OFF': '11'},
    **{'LAT_SCALE': '0.05', 'LONG_SCALE': '0.06'},
    **{'HEIGHT_OFF': '0', 'HEIGHT_SCALE': '100'},
    'LINE_NUM_COEFF': '0.01 0.02 -1 0.003 ' + '0 ' * 16,
    'SAMP_NUM_COEFF': '0.02 0.97 0.01 0.004 ' + '0 ' * 16,
    'LINE_DEN_COEFF': '1 0.01 0.002 ' + '0 ' * 17,
    'SAMP_DEN_COEFF': '1 0.001 0.02 ' + '0 ' * 17,
}


@pytest.mark.parametrize('growth', [(0.5, 0.25), (2, 3), (1, 1)])
def test_polynomials_are_resized(growth):
    """GDAL finds a place on earth at the same share of both rasters."""
    from rasterio.rpc import RPC as Polynomials
    from rasterio.transform import RPCTransformer

    down, across = growth
    place = Georeference(rpcs=tuple(CAMERA.items()))
    other = place.resized(1024, 800, int(1024 * down), int(800 * across))
    texts = dict(CAMERA, LINE_OFF='512.5')
    found = []
    for rpcs in (texts, dict(other.rpcs)):
        with RPCTransformer(Polynomials.from_gdal(rpcs)) as transformer:
            found.append(
                transformer.rowcol(
                    [11.0, 11.02, 10.97],
                    [48.0, 47.98, 48.03],
                    zs=[0, 50, 9],
                    op=lambda x: x,
                )
            )
    (rows, cols), (new_rows, new_cols) = np.array(found)
    assert new_rows == pytest.approx(rows * down, abs=1e-6)
    assert new_cols == pytest.approx(cols * across, abs=1e-6)


def test_polynomials_that_are_no_numbers():
    place = Georeference(rpcs=(('LINE_OFF', 'many'),))
    with pytest.raises(ValueError, match="RPC LINE_OFF='many' is no number"):
        place.resized(2, 2, 1, 1)


def test_a_virtual_raster(tmp_path):
    """Read by GDAL, window by window, with its coordinates."""
    make(tmp_path / 'a.tif', **CASES['code'])
    path = tmp_path / 'b.vrt'
    path.write_text(
        '<VRTDataset rasterXSize="20" rasterYSize="30">'
        f'<SRS>{CASES["code"]["crs"].to_wkt()}</SRS>'
        f'<GeoTransform>{", ".join(map(str, NORTH_UP.to_gdal()))}'
        '</GeoTransform><VRTRasterBand dataType="UInt16" band="1">'
        '<NoDataValue>7</NoDataValue><SimpleSource><SourceFilename '
        'relativeToVRT="1">a.tif</SourceFilename><SourceBand>1</SourceBand>'
        '</SimpleSource></VRTRasterBand></VRTDataset>'
    )
    window = Window(3, 5, 11, 13)
    with open_raster(path) as reader:
        again = pickle.loads(pickle.dumps(reader))
        for one in (reader, again):
            pixels = one.read(window)
            assert pixels.dtype == np.uint16
            assert np.array_equal(pixels[..., 0], PIXELS[window.slices])
        assert (reader.meta.height, reader.meta.width) == (30, 20)
        valid = reader.read_valid(Window(0, 0, 30, 20))
        assert np.array_equal(valid, PIXELS != 7)
        assert reader.meta.georeference.transform == tuple(NORTH_UP)[:6]
    again.close()
    (tmp_path / 'a.tif').unlink()
    with (
        open_raster(path) as reader,
        pytest.raises(ValueError, match=r'b\.vrt: cannot be read by GDAL'),
    ):
        reader.read(window)
    path.write_text('<VRTDataset rasterXSize="20"')
    with pytest.raises(ValueError, match=r'b\.vrt: cannot be read by GDAL'):
        open_raster(path)


def test_shared_rasters(shared):
    """Coordinates as rasterio tells them, of whatever can be read."""
    found = 0
    for path in sorted((shared / 'data' / 'raster').iterdir()):
        try:
            with open_raster(path) as reader:
                place = reader.meta.georeference
        except ValueError:
            continue
        with rasterio.open(path) as dataset:
            assert (place is not None and place.crs is not None) == bool(
                dataset.crs
            )
            if place is not None and place.transform is not None:
                assert place.transform == tuple(dataset.transform)[:6]
                found += 1
    assert found > 5
