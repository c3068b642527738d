# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import multiprocessing
import pickle
import sys

import cv2
import numpy as np
import pytest

from infsa_seg.raster import Window, open_raster
from infsa_seg.raster.slide import SlideReader, _background, _composite
from infsa_seg.raster.tiff import TiffReader

from .strategies import check_windows, smooth, write_cog

openslide = pytest.importorskip('openslide')
tifffile = pytest.importorskip('tifffile')
pytest.importorskip('imagecodecs')

SIZES = (1000, 1003), (252, 253), (63, 64)
ABOUT = (
    'Aperio Image Library v12.0.15\r\n1003x1000 [0,0 1003x1000] (64x64) '
    'JPEG/RGB Q=90|AppMag = 20|MPP = 0.4990|ScanScope ID = X'
)


def write_svs(path, sizes=SIZES):
    """A slide as Aperio writes it, with its thumbnail after the first."""
    full = smooth(*sizes[0])
    how = dict(photometric='rgb', compression='jpeg', metadata=None)
    with tifffile.TiffWriter(path) as file:
        for size in sizes:
            level = cv2.resize(full, size[::-1], interpolation=cv2.INTER_AREA)
            file.write(level, tile=(64, 64), description=ABOUT, **how)
            if size == sizes[0]:
                small = cv2.resize(full, (100, 99))
                file.write(small, rowsperstrip=16, description='Aperio', **how)
    return path


def by_tifffile(path):
    with tifffile.TiffFile(path) as file:
        return [level.asarray() for level in file.series[0].levels]


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return write_svs(tmp_path_factory.mktemp('slides') / 'a.svs')


@pytest.fixture
def reader(path):
    with open_raster(path) as reader:
        yield reader


def test_what_is_known_of_a_slide(reader):
    meta = reader.meta
    assert isinstance(reader, SlideReader)
    assert (meta.height, meta.width) == SIZES[0]
    assert meta.level_sizes == SIZES
    assert (meta.channels, meta.dtype) == (3, np.uint8)
    assert meta.mpp == (0.499, 0.499)
    assert meta.has_alpha and not meta.all_valid
    # Of whole tiles.
    assert meta.block_rows == 256


@pytest.mark.parametrize('level', range(3))
def test_windows_are_cut_out_of_blocks_that_openslide_reads(
    path, reader, level
):
    height, width = SIZES[level]
    expected = np.zeros((height, width, 4), np.uint8)
    with openslide.OpenSlide(path) as slide:
        scale = slide.level_downsamples[level]
        for row in range(0, height, 256):
            for col in range(0, width, 256):
                size = min(256, width - col), min(256, height - row)
                place = round(col * scale), round(row * scale)
                block = np.array(slide.read_region(place, level, size))
                expected[row : row + 256, col : col + 256] = block
    assert (expected[..., 3] == 255).all()
    valid = np.ones((height, width), bool)
    check_windows(reader, level, expected[..., :3], valid)


def test_levels_are_those_of_the_file(path, reader):
    for level, expected in enumerate(by_tifffile(path)):
        pixels = reader.read(Window(0, 0, *SIZES[level]), level)
        assert np.array_equal(pixels, expected)


def test_blocks_lie_within_half_a_pixel_of_level_0(tmp_path):
    """Beyond the first block, OpenSlide has to interpolate."""
    path = write_svs(tmp_path / 'a.svs', [(700, 2300), (327, 1075)])
    expected = by_tifffile(path)[1]
    with open_raster(path) as reader:
        scale = reader._scales[1]
        assert not (256 * scale).is_integer()
        pixels = reader.read(Window(0, 0, 327, 1075), 1)
        valid = reader.read_valid(Window(0, 0, 327, 1075), 1)
    # Nor does it at the first row of blocks.
    pixels, expected = pixels[:256], expected[:256]
    assert np.array_equal(pixels[:, :256], expected[:, :256])
    steps = np.abs(np.diff(expected.astype(int), axis=1)).max()
    off = np.abs(pixels.astype(int) - expected).max(axis=(0, 2))
    assert 0 < off[256:1074].max() <= steps / 2 / scale + 2
    assert valid.all()


def test_a_row_of_blocks_is_kept_of_the_level_read_last(reader, monkeypatch):
    keys = []
    read = SlideReader._read
    monkeypatch.setattr(
        SlideReader,
        '_read',
        lambda self, block, level, window: (
            keys.append((level, block.row, block.col))
            or read(self, block, level, window)
        ),
    )
    for row in range(0, 1000, 100):
        reader.read(Window(row, 0, 100, 1003))
        reader.read_valid(Window(row, 0, 100, 1003))
        kept = sum(block.nbytes for block in reader._blocks.values())
        assert 0 < kept <= reader.meta.nbytes_resident - 32 * 2**20
    assert len(keys) == len(set(keys)) == 16
    reader.read(Window(0, 0, 9, 9), 2)
    assert list(reader._blocks) == [(0, 0)]


@pytest.mark.parametrize('level', range(2))
def test_what_was_not_scanned_is_not_valid(tmp_path, level):
    full = smooth(200, 260)
    how = dict(photometric='rgb', tile=(64, 64), metadata=None)
    with tifffile.TiffWriter(tmp_path / 'a.tif') as file:
        for step in (1, 2):
            part = np.ascontiguousarray(full[::step, ::step])
            tiles = [
                part[row : row + 64, col : col + 64]
                for row in range(0, part.shape[0], 64)
                for col in range(0, part.shape[1], 64)
            ]
            # The second tile was never written.
            file.write(
                iter([tiles[0], None, *tiles[2:]]),
                shape=part.shape,
                dtype=np.uint8,
                subfiletype=step - 1,
                compression='zlib',
                **how,
            )
    expected = full[:: level + 1, :: level + 1].copy()
    expected[:64, 64:128] = 255
    valid = np.ones(expected.shape[:2], bool)
    valid[:64, 64:128] = False
    with open_raster(tmp_path / 'a.tif', reader='openslide') as reader:
        assert isinstance(reader, SlideReader) and reader.meta.mpp is None
        check_windows(reader, level, expected, valid)
    value = int(full[100, 100, 0])
    with open_raster(tmp_path / 'a.tif', value, reader='openslide') as reader:
        told = reader.read_valid(Window(0, 0, *valid.shape), level)
    assert np.array_equal(told, valid & (expected != value).any(2))
    # Whoever made it, it is a TIFF like any other.
    with open_raster(tmp_path / 'a.tif') as reader:
        assert isinstance(reader, TiffReader)


def test_the_background_shows_through():
    assert _background({}).tolist() == [255, 255, 255]
    assert _background({'openslide.background-color': '?'}).tolist()[0] == 255
    colour = _background({'openslide.background-color': '0A141E'})
    assert colour.tolist() == [10, 20, 30]
    stored = np.zeros((1, 256, 4), np.uint8)
    stored[0, :, 3] = np.arange(256)
    stored[0, :, :3] = 200, 100, 50
    share = stored[..., 3:] / 255
    expected = share * [200, 100, 50] + (1 - share) * colour
    _composite(stored, colour)
    assert np.abs(stored[..., :3] - expected).max() <= 0.51


@pytest.mark.filterwarnings('ignore:Dataset has no geotransform')
def test_masks_of_gdal_are_no_levels(tmp_path):
    """To OpenSlide they are."""
    stored = smooth(300, 420)
    write_cog(tmp_path / 'a.tif', stored, np.ones((300, 420), bool))
    with openslide.OpenSlide(tmp_path / 'a.tif') as slide:
        assert slide.level_count == 5
    with open_raster(tmp_path / 'a.tif', reader='openslide') as reader:
        assert reader.meta.level_sizes == (
            (300, 420),
            (150, 210),
            (75, 105),
        )
        for level, expected in enumerate(by_tifffile(tmp_path / 'a.tif')):
            size = expected.shape[:2]
            pixels = reader.read(Window(0, 0, *size), level)
            assert np.array_equal(pixels, expected)


def test_after_damage_the_rest_can_be_read(path, tmp_path):
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        start, count = page.dataoffsets[-1], page.databytecounts[-1]
    content = bytearray(path.read_bytes())
    content[start : start + count] = bytes(count)
    (tmp_path / 'b.svs').write_bytes(content)
    with open_raster(tmp_path / 'b.svs') as reader:
        good = Window(0, 0, 400, 400)
        before = reader.read(good)
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=r'^[^\n]*b\.svs: level 0 is damaged within the 9x8 '
                r'pixels at \(990, 995\)[^\n]*$',
            ):
                reader.read(Window(990, 995, 9, 8))
            assert np.array_equal(reader.read(good), before)
        assert reader.read(Window(0, 0, 252, 253), 1).any()


def test_real_slides(shared):
    folder = shared / 'data/wsi'
    with open_raster(folder / 'small.svs') as reader:
        assert isinstance(reader, SlideReader)
        pixels = reader.read(Window(0, 0, 16, 16))
        assert reader.meta.mpp == (0.499, 0.499)
    with openslide.OpenSlide(folder / 'small.svs') as slide:
        expected = np.array(slide.read_region((0, 0), 0, (16, 16)))
    assert np.array_equal(pixels, expected[..., :3])
    with (
        open_raster(folder / 'unreadable.svs') as reader,
        pytest.raises(ValueError, match=r'unreadable\.svs: level 0 is dama'),
    ):
        reader.read(Window(0, 0, 16, 16))
    for name in ('auto', 'openslide'):
        with open_raster(folder / 'boxes.tiff', reader=name) as reader:
            assert len(reader.meta.level_sizes) == 4
            assert reader.meta.mpp == pytest.approx((352.78, 352.78), 1e-4)
            levels = by_tifffile(folder / 'boxes.tiff')
            for level, expected in enumerate(levels):
                size = reader.meta.level_sizes[level]
                pixels = reader.read(Window(0, 0, *size), level)
                assert np.array_equal(pixels, expected)


def test_without_openslide_it_is_a_tiff(path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'openslide', None)
    with open_raster(path) as reader:
        assert isinstance(reader, TiffReader)
        assert reader.meta.level_sizes == SIZES
        assert reader.meta.mpp == (0.499, 0.499)
        for level, expected in enumerate(by_tifffile(path)):
            check_windows(reader, level, expected)
    with pytest.raises(ValueError, match=r'needs? openslide; run pip'):
        open_raster(path, reader='openslide')


def test_a_slide_of_several_files_is_known(tmp_path):
    """By the one that it is opened by, whose content is a thumbnail."""
    cv2.imwrite(str(tmp_path / 'a.jpg'), smooth(20, 20))
    (tmp_path / 'a.jpg').rename(tmp_path / 'a.mrxs')
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a/Slidedat.ini').write_text('[GENERAL]\nSLIDE_ID = 1\n')
    with pytest.raises(ValueError, match=r'a\.mrxs: is damaged, or no slide'):
        open_raster(tmp_path / 'a.mrxs')


def test_it_is_pickled_without_pixels(reader):
    window = Window(3, 400, 300, 400)
    expected = reader.read(window)
    content = pickle.dumps(reader)
    assert len(content) < 3000
    with pickle.loads(content) as copy:
        assert copy.meta == reader.meta
        assert np.array_equal(copy.read(window), expected)
    assert np.array_equal(copy.read(window), expected)
    copy.close()


def test_a_forked_process_opens_it_again(reader):
    expected = reader.read(Window(0, 0, 300, 300))
    handle = reader._slide
    fork = multiprocessing.get_context('fork')
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=_check_child, args=(reader, handle, send))
    child.start()
    pixels, apart = receive.recv()
    child.join()
    assert apart and np.array_equal(pixels, expected)
    reader._blocks.clear()
    assert np.array_equal(reader.read(Window(0, 0, 300, 300)), expected)
    assert reader._slide is handle


def _check_child(reader, handle, send):
    reader._blocks.clear()
    pixels = reader.read(Window(0, 0, 300, 300))
    send.send((pixels, reader._slide is not handle))
