# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is written lies where the source lay, in any way that files have it."""

import pickle

import numpy as np
import pytest

from infsa_seg.raster import GeoTiffWriter, Window, open_raster

rasterio = pytest.importorskip('rasterio')
pytestmark = pytest.mark.filterwarnings(
    'ignore:Dataset has no geotransform', 'ignore:The given matrix'
)

from rasterio.control import GroundControlPoint  # noqa: E402
from rasterio.crs import CRS  # noqa: E402
from rasterio.transform import Affine  # noqa: E402

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
