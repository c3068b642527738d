# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings

from infsa_seg.raster import Window, open_raster
from infsa_seg.raster.npy import NpyReader

from .strategies import HEIGHT, WIDTH, noise, whole, windows

ARRAYS = {
    'grey': noise(HEIGHT, WIDTH),
    'rgb': noise(HEIGHT, WIDTH, 3),
    'uint16, big-endian': noise(HEIGHT, WIDTH, 2, dtype='>u2'),
    'float16': noise(HEIGHT, WIDTH, 2, dtype=np.float16),
    'columns first': np.asfortranarray(noise(HEIGHT, WIDTH, 3)),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('npy')
    for name, array in ARRAYS.items():
        np.save(folder / f'{name}.npy', array)
    return folder


@pytest.mark.parametrize('name', ARRAYS)
@settings(max_examples=10)
@given(window=windows())
def test_a_window_is_the_crop(folder, name, window):
    array = ARRAYS[name]
    with open_raster(folder / f'{name}.npy') as reader:
        pixels = reader.read(window)
        assert isinstance(reader, NpyReader)
        assert reader.meta.dtype == pixels.dtype
        assert pixels.dtype == array.dtype.newbyteorder('=')
    assert pixels.dtype.isnative and pixels.flags.c_contiguous
    assert pixels.flags.owndata or pixels.base.flags.owndata
    assert pixels.shape == (*window[2:], reader.meta.channels)
    assert np.array_equal(
        pixels, array.reshape(HEIGHT, WIDTH, -1)[window.slices]
    )


def test_what_is_valid(tmp_path):
    array = noise(8, 9, 2, dtype=np.float32)
    array[1, 1] = -1
    array[2, 2, 0] = -1
    array[3, 3, 1] = np.nan
    np.save(tmp_path / 'a.npy', array)
    for nodata, invalid in ((None, [(3, 3)]), (-1, [(1, 1), (3, 3)])):
        with open_raster(tmp_path / 'a.npy', nodata) as reader:
            valid = reader.read_valid(Window(1, 1, 5, 5))
        assert valid.dtype == bool and valid.shape == (5, 5)
        found = (np.argwhere(~valid) + 1).tolist()
        assert found == [list(place) for place in invalid]


def test_integers_without_nodata_are_valid(tmp_path):
    np.save(tmp_path / 'a.npy', noise(8, 9))
    with open_raster(tmp_path / 'a.npy') as reader:
        assert reader.read_valid(whole(reader)) is None


def test_booleans_are_read_as_numbers(tmp_path):
    np.save(tmp_path / 'a.npy', noise(8, 9) > 100)
    with open_raster(tmp_path / 'a.npy') as reader:
        assert reader.read(whole(reader)).dtype == np.uint8


@pytest.mark.parametrize(
    'array',
    [
        np.zeros(4),
        np.zeros((1, 2, 3, 4)),
        np.zeros((0, 3)),
        np.zeros((2, 2), complex),
        np.zeros((2, 2), 'U3'),
        np.zeros((2, 2), [('a', int)]),
    ],
    ids=str,
)
def test_other_arrays_are_refused(tmp_path, array):
    np.save(tmp_path / 'a.npy', array)
    with pytest.raises(ValueError, match=r'a\.npy: has an array of shape'):
        open_raster(tmp_path / 'a.npy')


def test_objects_are_not_loaded(tmp_path):
    np.save(tmp_path / 'a.npy', np.array([[{}]]), allow_pickle=True)
    with pytest.raises(ValueError, match=r'a\.npy: is cut off or no array'):
        open_raster(tmp_path / 'a.npy')


@pytest.mark.parametrize('share', [0.05, 0.5, 0.999])
def test_a_cut_file_is_an_error(tmp_path, share):
    np.save(tmp_path / 'a.npy', noise(40, 50))
    content = (tmp_path / 'a.npy').read_bytes()
    (tmp_path / 'a.npy').write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r'^[^\n]*a\.npy: is cut off[^\n]*$'):
        open_raster(tmp_path / 'a.npy')
