# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import subprocess
import warnings

import numpy as np
import pytest

from infsa_seg.raster import (
    GeoTiffWriter,
    Window,
    class_map_type,
    open_raster,
)

from .strategies import noise, whole

rasterio = pytest.importorskip('rasterio')
pytestmark = pytest.mark.filterwarnings(
    # Of the tests that read what was written with rasterio.
    'ignore:Dataset has no geotransform'
)

HEIGHT, WIDTH = 75, 110
CLASSES = noise(HEIGHT, WIDTH) % 5
PALETTE = [(0, 0, 0), (1, 2, 3), (40, 50, 60), (7, 8, 9), (255, 255, 255)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'a.tif'


@pytest.fixture
def writes(monkeypatch):
    """The windows that are handed to GDAL."""
    windows = []

    class Dataset:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            return getattr(self.dataset, name)

        def write(self, pixels, window):
            windows.append(window)
            self.dataset.write(pixels, window=window)

    open_dataset = rasterio.open
    monkeypatch.setattr(
        rasterio,
        'open',
        lambda *args, **kw: Dataset(open_dataset(*args, **kw)),
    )
    return windows


def small(path, **settings):
    """A writer of CLASSES in small tiles."""
    settings = {'height': HEIGHT, 'width': WIDTH, 'tile': 32} | settings
    return GeoTiffWriter(path, **settings)


def write(path, pixels, step=HEIGHT, **settings):
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    settings = {'channels': channels, 'dtype': pixels.dtype} | settings
    with small(path, **settings) as writer:
        for row in range(0, HEIGHT, step):
            writer.write(row, pixels[row : row + step])


@pytest.mark.parametrize('compress', ['deflate', 'lzw', 'zstd', 'none'])
@pytest.mark.parametrize(
    'pixels',
    [
        CLASSES,
        noise(HEIGHT, WIDTH, 3),
        noise(HEIGHT, WIDTH, 7, dtype=np.float32) / 3,
        noise(HEIGHT, WIDTH, 2, dtype=np.int16),
        noise(HEIGHT, WIDTH, 1, dtype=np.float64),
    ],
    ids=lambda pixels: f'{pixels.dtype}{pixels.shape[2:]}',
)
def test_what_is_written_is_read(path, pixels, compress):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        write(path, pixels, 7, compress=compress)
    with rasterio.open(path) as file:
        read = np.moveaxis(file.read(), 0, 2)
        profile = file.profile
    assert read.dtype == pixels.dtype
    assert np.array_equal(read, pixels.reshape(read.shape))
    assert profile['tiled'] and profile['blockysize'] == 32
    assert profile.get('compress', 'none') == compress
    # Nothing beside it, and our own reader agrees.
    assert os.listdir(path.parent) == ['a.tif']
    with open_raster(path) as reader:
        again = reader.read(whole(reader))
    assert np.array_equal(again, read)


def test_colours_names_nodata_and_tags(path):
    names = ['field', 'wäre', 'c', 'd', 'e']
    tags = {'MODEL': 'infvit', 'SEED': '3'}
    write(
        path,
        CLASSES,
        palette=PALETTE,
        class_names=names,
        nodata=4,
        metadata=tags,
    )
    with rasterio.open(path) as file:
        colours = file.colormap(1)
        assert [colours[i][:3] for i in range(5)] == PALETTE
        assert file.nodata == 4
        assert file.tags()['MODEL'] == 'infvit'
        assert json.loads(file.tags()['CLASS_NAMES']) == names
        assert np.array_equal(file.read(1), CLASSES)
    assert os.listdir(path.parent) == ['a.tif']
    with open_raster(path) as reader:
        window = Window(3, 4, 50, 60)
        pixels, valid = reader.read(window), reader.read_valid(window)
    expected = CLASSES[window.slices]
    assert np.array_equal(pixels, np.array(PALETTE)[expected])
    assert np.array_equal(valid, expected != 4)


@pytest.mark.parametrize('step', [1, 7, 32, 33, 64, 75])
def test_each_block_is_written_once(path, writes, step):
    pixels = noise(HEIGHT, WIDTH, 6)
    write(path, pixels, step)
    rows = [(window.row_off, window.height) for window in writes]
    assert rows == [(0, 32), (32, 32), (64, 11)]
    size = path.stat().st_size
    write(path, pixels, overwrite=True)
    assert path.stat().st_size == size
    with open_raster(path) as reader:
        assert np.array_equal(reader.read(whole(reader)), pixels)


def test_the_cache_of_gdal_is_capped_while_it_writes(path, monkeypatch):
    env = pytest.importorskip('rasterio._env')
    before = env.get_gdal_config('GDAL_CACHEMAX')
    caps = []
    flush = GeoTiffWriter._flush

    def spy(self, rows):
        with self._gdal():
            caps.append(env.get_gdal_config('GDAL_CACHEMAX'))
        flush(self, rows)

    monkeypatch.setattr(GeoTiffWriter, '_flush', spy)
    with small(path) as writer:
        writer.write(0, CLASSES)
        assert writer.nbytes_resident == 2**26 + 32 * WIDTH
    assert caps == [2**26] * 3
    assert env.get_gdal_config('GDAL_CACHEMAX') == before


@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize('exists', [False, True])
def test_an_interruption_leaves_no_trace(path, error, exists):
    if exists:
        path.write_text('as it was')
    with pytest.raises(error), small(path, overwrite=True) as writer:
        writer.write(0, CLASSES[:50])
        assert len(os.listdir(path.parent)) == 1 + exists
        raise error
    assert os.listdir(path.parent) == ['a.tif'] * exists
    assert not exists or path.read_text() == 'as it was'


def test_missing_rows_are_an_error(path):
    with (
        pytest.raises(ValueError, match=r'a\.tif: only 50 of 75 rows'),
        small(path) as writer,
    ):
        writer.write(0, CLASSES[:50])
    assert not os.listdir(path.parent)


def test_closing_twice_is_fine(path):
    writer = small(path)
    writer.write(0, CLASSES)
    writer.close()
    writer.close()
    writer.abort()
    assert os.listdir(path.parent) == ['a.tif']


@pytest.mark.parametrize(
    ('row', 'pixels', 'problem'),
    [
        (0, CLASSES[:5], 'rows 0 to 5 cannot be written after 10 of 75'),
        (11, CLASSES[:5], 'rows 11 to 16 cannot be written after 10 of 75'),
        (10, CLASSES, 'rows 10 to 85 cannot be written after 10 of 75'),
        (10, CLASSES[:5, :-1], 'has rows of (110, 1) uint8, not (109, 1) ui'),
        (10, CLASSES[:5] / 1.0, 'has rows of (110, 1) uint8, not (110, 1) fl'),
        (10, noise(5, WIDTH, 3), 'has rows of (110, 1) uint8, not (110, 3) u'),
    ],
)
def test_other_rows_are_refused(path, row, pixels, problem):
    with pytest.raises(ValueError) as caught, small(path) as writer:
        writer.write(0, CLASSES[:10])
        writer.write(row, pixels)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ('settings', 'problem'),
    [
        ({'height': 0}, 'is empty'),
        ({'channels': 0}, 'is empty'),
        ({'tile': 100}, 'tile=100 must be a multiple of 16'),
        ({'compress': 'rar'}, "compress='rar' is unknown"),
        ({'dtype': np.complex64}, 'no type complex64'),
        ({'dtype': complex}, 'no type complex128'),
        ({'dtype': bool}, 'no type bool'),
        ({'nodata': -1}, 'nodata=-1 is no value'),
        ({'channels': 3, 'palette': PALETTE}, 'a palette is for one channel'),
        ({'dtype': np.uint16, 'palette': PALETTE}, 'a palette is for one'),
        ({'palette': PALETTE * 60}, 'at most 256 colours, not 300'),
    ],
)
def test_settings_that_do_not_fit(path, settings, problem):
    with pytest.raises(ValueError, match=r'a\.tif: ') as caught:
        small(path, **settings)
    assert problem in str(caught.value)
    assert not os.listdir(path.parent)


def test_an_existing_file_is_kept_unless_told(path):
    path.write_text('as it was')
    with pytest.raises(FileExistsError) as caught:
        small(path)
    assert caught.value.filename == str(path)
    assert caught.value.strerror == 'exists; use --overwrite'
    assert os.listdir(path.parent) == ['a.tif']
    assert path.read_text() == 'as it was'
    write(path, CLASSES, overwrite=True)
    with rasterio.open(path) as file:
        assert np.array_equal(file.read(1), CLASSES)


def test_places_that_cannot_be_written(path):
    path.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        small(path, overwrite=True)
    assert caught.value.filename == str(path)
    (path / 'file').touch()
    with pytest.raises(OSError) as caught:
        small(path / 'file' / 'b.tif')
    assert str(path / 'file') in str(caught.value)


def test_a_directory_without_permission(path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, 'Permission denied', str(self))

    # Root may write anywhere, and tests may run as root.
    monkeypatch.setattr(type(path), 'touch', refuse)
    with pytest.raises(PermissionError) as caught:
        small(path)
    assert caught.value.filename == str(path)
    assert caught.value.strerror == 'cannot be written: Permission denied'


def test_the_directory_is_made(tmp_path):
    write(tmp_path / 'deep' / 'er' / 'a.tif', CLASSES)
    assert (tmp_path / 'deep' / 'er' / 'a.tif').is_file()


def test_what_dead_processes_left_is_removed(path):
    with subprocess.Popen(['true']) as process:
        process.wait()
    dead, running = process.pid, os.getppid()
    others = (
        f'.a.tif.{running}.part',
        f'.b.tif.{dead}.part',
        '.a.tif.x.part',
        f'.a.tif.{dead}.tif.{running}.part',
    )
    left = (f'.{dead}.part', f'.{dead}.rows.part', f'.{dead}.part.aux.xml')
    for name in (*(f'.a.tif{end}' for end in left), *others):
        (path.parent / name).touch()
    write(path, CLASSES)
    assert sorted(os.listdir(path.parent)) == sorted(['a.tif', *others])


@pytest.mark.parametrize(('side', 'big'), [(65_000, False), (65_537, True)])
def test_large_files_are_bigtiff_from_the_start(path, side, big):
    writer = GeoTiffWriter(path, side, side)
    # The head is written with the first pixels.
    writer.write(0, np.zeros((256, side), np.uint8))
    writer._dataset.close()
    magic = writer._part.read_bytes()[:4]
    writer._dataset = None
    writer.abort()
    assert magic == (b'II+\0' if big else b'II*\0')


@pytest.mark.parametrize(
    ('num_classes', 'dtype', 'nodata'),
    [
        (1, np.uint8, 255),
        (255, np.uint8, 255),
        (256, np.uint16, 65535),
        (65535, np.uint16, 65535),
    ],
)
def test_type_of_a_class_map(path, num_classes, dtype, nodata):
    found = class_map_type(num_classes)
    assert found == (dtype, nodata)
    # The last class and nodata are told apart in the file.
    pixels = np.array([[num_classes - 1, nodata]], found[0])
    with GeoTiffWriter(path, 1, 2, dtype=found[0], nodata=found[1]) as writer:
        writer.write(0, pixels)
    with rasterio.open(path) as file:
        read = file.read(1, masked=True)
    assert read.mask.tolist() == [[False, True]]
    assert read.data[0, 0] == num_classes - 1


@pytest.mark.parametrize('num_classes', [-1, 0, 65536])
def test_no_class_map(num_classes):
    with pytest.raises(ValueError, match=f'a map of {num_classes} classes'):
        class_map_type(num_classes)


@pytest.mark.parametrize('limit', [300, 4000, 8500])
@pytest.mark.parametrize('free', [100, 2**30])
def test_a_full_disk_names_the_file(path, monkeypatch, limit, free):
    resource = pytest.importorskip('resource')
    usage = type('Usage', (), {'free': free})
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH))
    try:
        with pytest.raises(OSError) as caught, small(path) as writer:
            # No file may grow beyond it: a disk that is as good as full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            writer.write(0, pixels.astype(np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    if free == 100:
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.strerror == 'the disk is full'
    else:
        assert caught.value.strerror.startswith('cannot be written: ')
    assert '\n' not in caught.value.strerror
    assert not os.listdir(path.parent)


def test_an_error_of_gdal_becomes_ours(path, monkeypatch):
    def fail(*_, **__):
        raise rasterio.errors.RasterioIOError('first line\nsecond line')

    with pytest.raises(OSError) as caught, small(path) as writer:
        monkeypatch.setattr(type(writer._dataset), 'write', fail)
        writer.write(0, CLASSES)
    assert type(caught.value) is OSError
    assert caught.value.filename == str(path)
    assert 'cannot be written: first line; is' in caught.value.strerror
    assert not os.listdir(path.parent)


def test_half_precision(path):
    """Bit for bit, in half the bytes; other programs see float32."""
    pixels = noise(HEIGHT, WIDTH).astype(np.float16) / 7
    with GeoTiffWriter(
        path, HEIGHT, WIDTH, dtype=np.float16, compress='none'
    ) as writer:
        writer.write(0, pixels)
    with rasterio.open(path) as dataset:
        assert dataset.dtypes == ('float32',)
        assert np.array_equal(dataset.read(1), pixels.astype(np.float32))
        assert dataset.tags(1, ns='IMAGE_STRUCTURE')['NBITS'] == '16'
    assert path.stat().st_size < 2.5 * 256 * 256
