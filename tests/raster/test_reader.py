# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import os

import numpy as np
import pytest

from infsa_seg.raster import READERS, RasterReader, Window, open_raster

from .strategies import noise


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / 'a.npy', noise(20, 30, 3))
    return tmp_path / 'a.npy'


def test_content_decides_and_not_the_name(path):
    named = path.rename(path.with_name('a.png'))
    with open_raster(str(named)) as reader:
        assert reader.meta.channels == 3
        assert isinstance(reader, RasterReader)


@pytest.mark.parametrize(
    'window',
    [
        Window(-1, 0, 3, 3),
        Window(0, -1, 3, 3),
        Window(18, 0, 3, 3),
        Window(0, 28, 3, 3),
        Window(3, 3, 0, 3),
        Window(3, 3, 3, 0),
        Window(50, 50, 3, 3),
    ],
)
def test_a_window_must_lie_within(path, window):
    with open_raster(path) as reader:
        for read in (reader.read, reader.read_valid):
            with pytest.raises(ValueError, match=r'a\.npy: a window of'):
                read(window)


def test_there_is_one_level(path):
    with (
        open_raster(path) as reader,
        pytest.raises(ValueError, match=r'a\.npy: has no level 1'),
    ):
        reader.read(Window(0, 0, 3, 3), level=1)


def test_the_system_says_which_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        open_raster(tmp_path / 'none.tif')
    assert caught.value.filename == str(tmp_path / 'none.tif')
    with pytest.raises(IsADirectoryError) as caught:
        open_raster(tmp_path)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize(
    ('content', 'problem'),
    [
        (b'', 'is empty'),
        (b'<VRTDataset rasterXSize="3">', 'cannot be read by GDAL'),
        (b'PK\x03\x04 of an npz', 'is damaged or no picture'),
        (b'II', 'is damaged or no picture'),
    ],
)
def test_what_is_no_raster(tmp_path, content, problem):
    (tmp_path / 'a.tif').write_bytes(content)
    with pytest.raises(ValueError, match=rf'^[^\n]*a\.tif: {problem}[^\n]*$'):
        open_raster(tmp_path / 'a.tif')


def test_a_file_that_went_away(path):
    with open_raster(path) as reader:
        os.remove(path)
        with pytest.raises(FileNotFoundError):
            reader.read(Window(0, 0, 3, 3))


@pytest.mark.parametrize('nodata', [-1, 0.5, 256, np.nan])
def test_nodata_must_be_a_value_of_the_type(path, nodata):
    with pytest.raises(ValueError, match=r'a\.npy: nodata=.* is no value'):
        open_raster(path, nodata)


def save_as(path, name):
    """A file for a reader, and one that it cannot read."""
    pixels = noise(20, 30, 3)
    if name == 'numpy':
        np.save(path, pixels)
        path.with_suffix('.npy').rename(path)
    elif name == 'opencv':
        path.write_bytes(
            pytest.importorskip('cv2').imencode('.png', pixels)[1]
        )
    else:
        tifffile = pytest.importorskip('tifffile')
        how = dict(photometric='rgb', tile=(16, 16), metadata=None)
        if name == 'openslide':
            how['compression'] = pytest.importorskip('imagecodecs') and 'zlib'
        tifffile.imwrite(path, pixels, **how)
    return path


@pytest.mark.parametrize('name', READERS[1:])
def test_a_reader_by_name(tmp_path, name):
    if name in ('rasterio', 'openslide'):
        pytest.importorskip(name)
    path = save_as(tmp_path / 'a', name)
    with open_raster(path, reader=name) as reader:
        pixels = reader.read(Window(3, 4, 10, 20))
        module = type(reader).__module__.rpartition('.')[2]
    assert np.array_equal(
        pixels[..., :: -1 if name == 'opencv' else 1],
        noise(20, 30, 3)[3:13, 4:24],
    )
    names = dict(rasterio='gdal', openslide='slide', opencv='picture')
    assert module == (names | dict(tifffile='tiff', numpy='npy'))[name]


@pytest.mark.parametrize(
    ('name', 'content', 'problem'),
    [
        ('tifffile', 'numpy', 'is no TIFF; use'),
        ('numpy', 'opencv', 'is no NumPy file; use'),
        ('rasterio', 'numpy', 'cannot be read by GDAL'),
        ('openslide', 'opencv', 'is damaged, or no slide that OpenSlide know'),
        ('opencv', 'numpy', 'is damaged or no picture'),
        ('opencv', 'tifffile', 'OpenCV leaves out channels'),
        ('pillow', 'opencv', "there is no reader 'pillow'; use one of auto, "),
    ],
)
def test_a_reader_that_cannot(tmp_path, name, content, problem):
    path = save_as(tmp_path / 'a', content)
    with pytest.raises(ValueError, match=rf'^[^\n]*/a: {problem}[^\n]*$'):
        open_raster(path, reader=name)


@pytest.mark.parametrize('kind', ['cielab', 'ycbcr', 'separated'])
@pytest.mark.filterwarnings('ignore:Dataset has no geotransform')
def test_gdal_reads_what_tifffile_does_not(tmp_path, kind):
    tifffile = pytest.importorskip('tifffile')
    rasterio = pytest.importorskip('rasterio')
    path = tmp_path / 'a.tif'
    pixels = noise(20, 30, 4 if kind == 'separated' else 3)
    tifffile.imwrite(path, pixels, photometric=kind, metadata=None)
    with open_raster(path) as reader:
        found = reader.read(Window(2, 3, 10, 20))
    with rasterio.open(path) as file:
        expected = np.moveaxis(file.read([1, 2, 3]), 0, 2)
    assert found.shape == (10, 20, 3)
    assert np.array_equal(found, expected[2:12, 3:23])
    with pytest.raises(ValueError, match=r'a\.tif: has its colours as'):
        open_raster(path, reader='tifffile')


def test_what_nobody_knows_is_said_by_the_first(tmp_path):
    tifffile = pytest.importorskip('tifffile')
    path = tmp_path / 'a.tif'
    tifffile.imwrite(path, noise(20, 30, dtype=complex), metadata=None)
    with pytest.raises(ValueError, match=r'a\.tif: has values of 128 bits'):
        open_raster(path)
    with pytest.raises(ValueError, match=r'of type complex128; convert it'):
        open_raster(path, reader='rasterio')


def test_dicom_that_is_no_slide(tmp_path):
    (tmp_path / 'a.dcm').write_bytes(bytes(128) + b'DICM' + bytes(50))
    with pytest.raises(ValueError, match=r'a\.dcm: is DICOM, but no slide'):
        open_raster(tmp_path / 'a.dcm')
