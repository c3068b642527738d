# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import logging
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import infsa_seg
from infsa_seg.raster import Window, open_raster
from infsa_seg.raster.tiff import TiffReader
from infsa_seg.raster.tiff_page import Page

from .strategies import HEIGHT, WIDTH, noise, whole, windows

tifffile = pytest.importorskip('tifffile')
pytest.importorskip('imagecodecs')

TILED = {'tile': (32, 48)}
RGB = {'photometric': 'rgb'}
GREY = {'photometric': 'minisblack'}
CONTIG = {'planarconfig': 'contig'}
PLANAR = {'planarconfig': 'separate'}
TREE = noise(HEIGHT, WIDTH, 3)
HOLES = noise(HEIGHT, WIDTH, dtype=np.float32)
HOLES[HOLES > 150] = np.nan

# Pixels, and how they are stored.
FILES = {
    'one strip': (TREE, RGB),
    'strips': (TREE, RGB | {'rowsperstrip': 7}),
    'strips, planar': (TREE, RGB | PLANAR | {'rowsperstrip': 7}),
    'strips, big-endian': (
        noise(HEIGHT, WIDTH, dtype=np.uint16),
        {'byteorder': '>', 'rowsperstrip': 16},
    ),
    'strips, deflate': (
        TREE,
        RGB | {'compression': 'zlib', 'rowsperstrip': 7},
    ),
    'strips, planar, lzw': (
        TREE,
        RGB | PLANAR | {'compression': 'lzw', 'rowsperstrip': 16},
    ),
    'tiles': (TREE, RGB | TILED),
    'tiles, deflate': (
        TREE,
        RGB | TILED | {'compression': 'zlib', 'predictor': True},
    ),
    'tiles, zstd': (
        noise(HEIGHT, WIDTH, dtype=np.int16) - 100,
        TILED | {'compression': 'zstd'},
    ),
    'tiles, planar': (
        noise(HEIGHT, WIDTH, 5, dtype=np.uint16),
        GREY | PLANAR | TILED | {'compression': 'zlib'},
    ),
    'tiles, BigTIFF, big-endian': (
        noise(HEIGHT, WIDTH, 5, dtype=np.uint16),
        GREY | TILED | CONTIG | {'bigtiff': True, 'byteorder': '>'},
    ),
    'float32': (
        HOLES,
        TILED | {'compression': 'zlib', 'predictor': True},
    ),
    'float64': (noise(HEIGHT, WIDTH, dtype=np.float64), {}),
    'bits': (noise(HEIGHT, WIDTH) > 100, {'compression': 'packbits'}),
}


def save(path, pixels, **how):
    """Write (H, W, ...) with tifffile, which has planes first."""
    if how.get('planarconfig') == 'separate':
        pixels = np.moveaxis(pixels, 2, 0)
    tifffile.imwrite(path, pixels, metadata=None, **how)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiff')
    for name, (pixels, how) in FILES.items():
        save(folder / f'{name}.tif', pixels, **how)
    return folder


@pytest.fixture(scope='module')
def readers(folder):
    readers = {name: open_raster(folder / f'{name}.tif') for name in FILES}
    yield readers
    for reader in readers.values():
        reader.close()


@pytest.fixture
def decoded(monkeypatch):
    """Indices of the blocks that are decoded."""
    indices = []
    decode = Page._decode

    def count(self, index):
        indices.append(index)
        return decode(self, index)

    monkeypatch.setattr(Page, '_decode', count)
    return indices


@pytest.mark.parametrize('name', FILES)
@settings(max_examples=10)
@given(window=windows())
def test_a_window_is_the_crop(readers, name, window):
    stored, reader = FILES[name][0], readers[name]
    pixels = reader.read(window)
    assert isinstance(reader, TiffReader)
    assert pixels.dtype == reader.meta.dtype and pixels.dtype.isnative
    assert pixels.flags.c_contiguous
    expected = stored.reshape(HEIGHT, WIDTH, -1)[window.slices]
    assert np.array_equal(pixels, expected, equal_nan=True)
    valid = reader.read_valid(window)
    if stored.dtype.kind == 'f':
        assert np.array_equal(valid, ~np.isnan(expected[..., 0]))
    else:
        assert valid is None


def test_jpeg_is_read_as_tifffile_reads_it(tmp_path):
    smooth = np.mgrid[:HEIGHT, :WIDTH][:, :, :, None] + [0, 40, 70]
    smooth = smooth.sum(0).astype(np.uint8)
    how = RGB | TILED | {'compression': 'jpeg'}
    save(tmp_path / 'a.tif', smooth, **how)
    with tifffile.TiffFile(tmp_path / 'a.tif') as file:
        assert file.pages[0].photometric.name == 'YCBCR'
        expected = file.asarray()
    with open_raster(tmp_path / 'a.tif') as reader:
        pixels = reader.read(Window(30, 40, 40, 60))
    assert np.array_equal(pixels, expected[30:70, 40:100])
    assert np.abs(pixels - smooth[30:70, 40:100].astype(int)).mean() < 3


@pytest.mark.parametrize('kind', ['unassalpha', 'assocalpha'])
@pytest.mark.parametrize('layout', [TILED, {}, PLANAR])
def test_alpha(tmp_path, kind, layout):
    stored = noise(HEIGHT, WIDTH, 5)
    stored[10:20, 20:40, 3] = 0
    # The alpha channel need not be the last.
    extra = [kind, 'unspecified']
    save(tmp_path / 'a.tif', stored, extrasamples=extra, **RGB, **layout)
    window = Window(5, 10, 30, 40)
    with open_raster(tmp_path / 'a.tif') as reader:
        assert reader.meta.has_alpha and reader.meta.channels == 4
        pixels, valid = reader.read(window), reader.read_valid(window)
    stored = stored[window.slices]
    assert np.array_equal(pixels, stored[..., [0, 1, 2, 4]])
    assert pixels.flags.c_contiguous
    assert np.array_equal(valid, stored[..., 3] > 0)


@pytest.mark.parametrize(
    ('dtype', 'text', 'value'),
    [
        (np.uint8, '0', 0),
        (np.int16, '-32768', -32768),
        (np.float32, '-3.4e+38', -3.4e38),
        (np.float32, '1e-1', 0.1),
        (np.float64, 'nan', np.nan),
        (np.uint8, '-9999', None),
        (np.uint8, 'none', None),
    ],
)
def test_nodata_of_gdal(tmp_path, capfd, dtype, text, value):
    stored = noise(HEIGHT, WIDTH, 2, dtype=dtype) + dtype(1)
    if value is not None:
        stored[3, 4] = stored[5, 6, 0] = value
    extra = [(42113, 's', 0, text, True)]
    save(tmp_path / 'a.tif', stored, extratags=extra, **GREY, **CONTIG)
    with open_raster(tmp_path / 'a.tif') as reader:
        valid = reader.read_valid(whole(reader))
        assert reader.meta.nodata == pytest.approx(value, nan_ok=True)
    if value is None:
        assert valid is None
    else:
        expected = [[3, 4], [5, 6]] if np.isnan(value) else [[3, 4]]
        assert np.argwhere(~valid).tolist() == expected
    # tifffile would log what it makes of such numbers.
    assert not capfd.readouterr().err


def test_nodata_of_the_caller_comes_first(tmp_path):
    stored = noise(HEIGHT, WIDTH)
    extra = [(42113, 's', 0, '0', True)]
    save(tmp_path / 'a.tif', stored, extratags=extra)
    with open_raster(tmp_path / 'a.tif', nodata=5) as reader:
        valid = reader.read_valid(whole(reader))
        assert reader.meta.nodata == 5
    assert np.array_equal(valid, stored != 5)
    with pytest.raises(ValueError, match=r'a\.tif: nodata=-1 is no value'):
        open_raster(tmp_path / 'a.tif', nodata=-1)


@pytest.mark.parametrize('depth', [2**8, 1], ids=['16 bit', '8 bit'])
def test_a_palette_becomes_colours(tmp_path, depth):
    stored = noise(HEIGHT, WIDTH)
    colours = np.random.default_rng(3).integers(0, 256, (3, 256))
    how = {'photometric': 'palette', 'compression': 'zlib'}
    table = (colours * depth).astype(np.uint16)
    save(tmp_path / 'a.tif', stored, colormap=table, **how)
    with open_raster(tmp_path / 'a.tif', nodata=7) as reader:
        pixels = reader.read(Window(2, 3, 20, 30))
        valid = reader.read_valid(Window(2, 3, 20, 30))
        assert (reader.meta.channels, reader.meta.dtype) == (3, np.uint8)
    stored = stored[2:22, 3:33]
    assert np.array_equal(pixels, colours.T[stored])
    assert np.array_equal(valid, stored != 7)


def test_the_mask_of_gdal(tmp_path):
    mask = noise(HEIGHT, WIDTH) > 100
    with tifffile.TiffWriter(tmp_path / 'a.tif') as file:
        file.write(TREE, photometric='rgb', metadata=None)
        # An overview, as they stand between the two.
        half = np.ascontiguousarray(TREE[::2, ::2])
        file.write(half, photometric='rgb', subfiletype=1, metadata=None)
        how = {'subfiletype': 4, 'photometric': 'mask', 'metadata': None}
        file.write(mask, compression='zlib', **how)
    with open_raster(tmp_path / 'a.tif') as reader:
        assert reader.meta.has_alpha and reader.meta.channels == 3
        assert np.array_equal(reader.read(whole(reader)), TREE)
        assert np.array_equal(reader.read_valid(whole(reader)), mask)


def test_blocks_that_were_never_written(tmp_path):
    rasterio = pytest.importorskip('rasterio')
    how = dict(driver='GTiff', dtype='uint8', count=1, SPARSE_OK=True)
    how |= dict(tiled=True, blockxsize=16, blockysize=16, nodata=9)
    how |= dict(height=40, width=50)
    with (
        pytest.warns(rasterio.errors.NotGeoreferencedWarning),
        rasterio.open(tmp_path / 'a.tif', 'w', **how) as file,
    ):
        window = rasterio.windows.Window(16, 16, 16, 16)
        file.write(np.ones((1, 16, 16), np.uint8), window=window)
    with open_raster(tmp_path / 'a.tif') as reader:
        pixels = reader.read(whole(reader))[..., 0]
        valid = reader.read_valid(whole(reader))
    expected = np.full((40, 50), 9)
    expected[16:32, 16:32] = 1
    assert np.array_equal(pixels, expected)
    assert np.array_equal(valid, expected == 1)
    # Another nodata says what is valid, not what is stored.
    with open_raster(tmp_path / 'a.tif', nodata=1) as reader:
        assert np.array_equal(reader.read(whole(reader))[..., 0], expected)
        valid = reader.read_valid(whole(reader))
    assert np.array_equal(valid, expected == 9)


@pytest.mark.parametrize(
    ('name', 'window', 'blocks'),
    [
        # Three columns of tiles, three rows.
        ('tiles, deflate', Window(0, 0, 1, 1), [0]),
        ('tiles, deflate', Window(31, 47, 2, 2), [0, 1, 3, 4]),
        ('tiles, deflate', Window(32, 48, 32, 48), [4]),
        ('tiles, planar', Window(33, 0, 1, 1), [3, 12, 21, 30, 39]),
        ('strips, deflate', Window(6, 5, 2, 9), [0, 1]),
        ('one strip', Window(6, 5, 2, 9), []),
    ],
)
def test_only_blocks_that_meet_the_window_are_decoded(
    folder, decoded, name, window, blocks
):
    with open_raster(folder / f'{name}.tif') as reader:
        assert not decoded
        reader.read(window)
    assert decoded == blocks


@pytest.mark.parametrize('name', ['tiles, deflate', 'strips, planar, lzw'])
def test_bands_decode_each_block_once(folder, decoded, name):
    with open_raster(folder / f'{name}.tif', nodata=0) as reader:
        for row in range(0, HEIGHT, 5):
            reader.read(Window(row, 0, 5, WIDTH))
            reader.read_valid(Window(row, 0, 5, WIDTH))
        blocks = reader._levels[0].picture._blocks
        kept = sum(block.nbytes for block in blocks.values())
        assert 0 < kept <= reader.meta.nbytes_resident
    assert len(decoded) == len(set(decoded)) > 4


def test_validity_after_reading_decodes_nothing(folder, decoded):
    window = Window(0, 0, 70, 90)
    with open_raster(folder / 'tiles, deflate.tif', nodata=7) as reader:
        reader.read(window)
        count = len(decoded)
        first = reader.read_valid(window)
        assert len(decoded) == count
        # Asked again, or of another window, it looks again.
        second = reader.read_valid(window)
        other = reader.read_valid(Window(1, 1, 70, 90))
    assert len(decoded) > count and first is not second
    assert np.array_equal(first, second)
    assert np.array_equal(first[1:, 1:], other[:-1, :-1])


def test_one_large_strip_is_not_read_whole(folder):
    with open_raster(folder / 'one strip.tif') as reader:
        assert reader.meta.block_rows == 1
        assert reader.meta.nbytes_resident < 1000
    with open_raster(folder / 'tiles, deflate.tif') as reader:
        assert reader.meta.block_rows == 32


@pytest.mark.parametrize('name', ['strips', 'tiles, deflate'])
def test_it_is_pickled_without_the_file(folder, name):
    with open_raster(folder / f'{name}.tif') as reader:
        reader.read(whole(reader))
        content = pickle.dumps(reader)
    assert len(content) < 1500
    with pickle.loads(content) as copy:
        assert copy.meta == reader.meta
        assert np.array_equal(copy.read(whole(copy)), TREE)
    # Closed is not the end.
    assert np.array_equal(copy.read(whole(copy)), TREE)
    copy.close()


def _read_in_child(reader, rows, send):
    same = True
    for row in rows:
        window = Window(row, 0, 5, WIDTH)
        same &= np.array_equal(reader.read(window), TREE[window.slices])
    send.send(same)


def test_forked_processes_do_not_share_their_place(folder):
    fork = multiprocessing.get_context('fork')
    reader = open_raster(folder / 'strips.tif')
    reader.read(whole(reader))
    handle = reader._file
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(
        target=_read_in_child, args=(reader, range(0, 70, 5), send)
    )
    process.start()
    assert receive.recv()
    process.join()
    reader.read(whole(reader))
    assert reader._file is handle
    reader.close()


@pytest.mark.parametrize('name', ['strips', 'tiles, deflate', 'float32'])
@pytest.mark.parametrize('share', [0.001, 0.01, 0.1, 0.5, 0.95, 1])
def test_a_cut_file_is_an_error(folder, tmp_path, name, share):
    content = (folder / f'{name}.tif').read_bytes()
    end = min(int(share * len(content)), len(content) - 1)
    (tmp_path / 'a.tif').write_bytes(content[: max(end, 4)])
    with pytest.raises(ValueError, match=r'^[^\n]*a\.tif: is [^\n]*$'):
        open_raster(tmp_path / 'a.tif')


def test_a_mask_that_was_cut_off_is_an_error(tmp_path):
    with tifffile.TiffWriter(tmp_path / 'a.tif') as file:
        file.write(TREE, photometric='rgb', metadata=None)
        how = {'subfiletype': 4, 'photometric': 'mask', 'metadata': None}
        file.write(TREE[..., 0] > 100, compression='zlib', **how)
    with tifffile.TiffFile(tmp_path / 'a.tif') as file:
        end = file.pages[1].offset
    content = (tmp_path / 'a.tif').read_bytes()
    for cut in (end, end + 20):
        (tmp_path / 'a.tif').write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r'a\.tif: is damaged'):
            open_raster(tmp_path / 'a.tif')


@pytest.mark.parametrize('compression', ['zlib', 'lzw', 'jpeg'])
def test_a_damaged_block_is_an_error(tmp_path, compression):
    how = RGB | TILED | {'compression': compression}
    save(tmp_path / 'a.tif', TREE, **how)
    with tifffile.TiffFile(tmp_path / 'a.tif') as file:
        start = file.pages[0].dataoffsets[4]
        nbytes = file.pages[0].databytecounts[4]
    content = bytearray((tmp_path / 'a.tif').read_bytes())
    # As a download leaves it that stopped within the file.
    half = nbytes // 2
    content[start + half : start + nbytes] = bytes(nbytes - half)
    (tmp_path / 'a.tif').write_bytes(content)
    with open_raster(tmp_path / 'a.tif') as reader:
        reader.read(Window(0, 0, 32, 48))
        with pytest.raises(ValueError, match=r'^[^\n]*a\.tif: is dam[^\n]*$'):
            reader.read(whole(reader))


def test_stacks_are_refused(tmp_path):
    stack = noise(4, HEIGHT, WIDTH)
    for name, how in (
        ('pages.tif', {'metadata': None}),
        ('volume.tif', {'volumetric': True}),
        ('a.ome.tif', {'metadata': {'axes': 'ZYX'}}),
        ('imagej.tif', {'imagej': True}),
    ):
        tifffile.imwrite(tmp_path / name, stack, **GREY, **how)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match='is a stack of shape'):
            open_raster(path)


def test_a_pyramid_is_read_at_full_resolution(tmp_path):
    with tifffile.TiffWriter(tmp_path / 'a.ome.tif') as file:
        file.write(TREE, subifds=1, photometric='rgb', **TILED)
        half = np.ascontiguousarray(TREE[::2, ::2])
        file.write(half, subfiletype=1, photometric='rgb', **TILED)
    with open_raster(tmp_path / 'a.ome.tif') as reader:
        assert np.array_equal(reader.read(whole(reader)), TREE)


@pytest.mark.parametrize(
    ('pixels', 'how', 'problem'),
    [
        (noise(HEIGHT, WIDTH, dtype=complex), {}, 'has values of 128 bits'),
        (
            noise(HEIGHT, WIDTH, 4),
            {'photometric': 'separated'},
            'has its colours as SEPARATED; convert it to RGB',
        ),
        (TREE, {'photometric': 'cielab'}, 'has its colours as CIELAB'),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, pixels, how, problem):
    save(tmp_path / 'a.tif', pixels, **how)
    with pytest.raises(ValueError, match=rf'a\.tif: {problem}'):
        open_raster(tmp_path / 'a.tif', reader='tifffile')


def test_a_missing_imagecodecs_is_named(folder):
    program = (
        'import sys, types\n'
        "sys.modules['imagecodecs'] = None\n"
        # Without what the package itself imports, which takes seconds.
        "package = sys.modules['infsa_seg'] = types.ModuleType('infsa_seg')\n"
        f'package.__path__ = {infsa_seg.__path__!r}\n'
        'from infsa_seg.raster import open_raster\n'
        f'folder = {str(folder)!r}\n'
        "open_raster(folder + '/tiles.tif').close()\n"
        'try:\n'
        "    path = folder + '/strips, planar, lzw.tif'\n"
        "    open_raster(path, reader='tifffile')\n"
        'except ValueError as error:\n'
        '    print(error)\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'LZW, which needs imagecodecs; run pip' in done.stdout


def test_the_log_of_tifffile_is_as_before(folder, caplog):
    with open_raster(folder / 'tiles.tif'), caplog.at_level(logging.WARNING):
        logging.getLogger('tifffile').warning('heard')
    assert 'heard' in caplog.text


@pytest.mark.parametrize(
    ('name', 'tolerance'),
    [
        ('RGB.byte.tif', 0),
        ('RGBA.uint16.tif', 0),
        ('all-nodata.tif', 0),
        ('alpha.tif', 0),
        # Two decoders that enlarge chroma each in its way.
        ('cogeo.tif', 16),
        ('float_nan.tif', 0),
        ('float_raster_with_nodata.tif', 0),
        ('rgb_deflate.tif', 0),
        ('rotated.tif', 0),
        ('spacenet_uint16_gray.tif', 0),
    ],
)
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_real_files_as_gdal_reads_them(shared, name, tolerance):
    rasterio = pytest.importorskip('rasterio')
    path = shared / 'data/raster' / name
    with rasterio.open(path) as file:
        expected, mask = np.moveaxis(file.read(), 0, 2), file.dataset_mask()
    with open_raster(path) as reader:
        pixels = reader.read(whole(reader))
        valid = reader.read_valid(whole(reader))
    np.testing.assert_allclose(
        pixels.astype(float),
        expected[..., : reader.meta.channels].astype(float),
        rtol=0,
        atol=tolerance,
    )
    assert np.array_equal(mask > 0, mask >= 0 if valid is None else valid)


@pytest.mark.parametrize('name', ['raster/corrupt.tif', 'wsi/unreadable.svs'])
def test_real_damage(shared, name):
    with (
        pytest.raises(ValueError, match=r'is damaged or cut off'),
        open_raster(shared / 'data' / name, reader='tifffile') as reader,
    ):
        reader.read(whole(reader))
