# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import os

import numpy as np
import pytest

from infsa_seg.raster import RasterReader, Window, open_raster

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
