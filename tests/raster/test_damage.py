# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is damaged is not valid; everything else is as it was."""

import dataclasses
import errno
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsa_seg.raster import (
    RasterMeta,
    RasterReader,
    TolerantReader,
    Window,
    open_raster,
)
from infsa_seg.raster.base import WindowReader
from infsa_seg.raster.tiff import Page, TiffReader

from .strategies import noise, whole, windows

tifffile = pytest.importorskip('tifffile')
pytest.importorskip('imagecodecs')

HEIGHT, WIDTH, TILE = 300, 420, 64
PIXELS = noise(HEIGHT, WIDTH, 3) + np.uint8(1)
ACROSS = -(-WIDTH // TILE)


def damage(path, blocks, content=b'\xa5'):
    """Overwrite blocks of the first page of a file."""
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        places = [
            (page.dataoffsets[i], page.databytecounts[i]) for i in blocks
        ]
    with path.open('r+b') as file:
        for offset, nbytes in places:
            file.seek(offset)
            file.write(content * nbytes)


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / 'a.tif')


def save(path, pixels=PIXELS, **how):
    how = {'tile': (TILE, TILE), 'compression': 'zlib'} | how
    tifffile.imwrite(path, pixels, **how)
    return path


def tiles(*places):
    """Blocks of the file, and where they are."""
    hidden = np.zeros((HEIGHT, WIDTH), bool)
    for row, col in places:
        hidden[Window(row * TILE, col * TILE, TILE, TILE).slices] = True
    return [row * ACROSS + col for row, col in places], hidden


def check(reader, hidden, window=None, pixels=PIXELS):
    window = window or whole(reader)
    expected = np.where(hidden[..., None], 0, pixels)[window.slices]
    assert np.array_equal(reader.read(window), expected)
    assert np.array_equal(reader.read_valid(window), ~hidden[window.slices])
    assert np.array_equal(reader.read_valid(window), ~hidden[window.slices])


@pytest.mark.parametrize('content', [b'\xa5', b'\0'])
@pytest.mark.parametrize('compression', ['zlib', 'lzw', 'zstd', 'jpeg'])
def test_damaged_tiles(path, compression, content):
    save(path, compression=compression)
    with open_raster(path) as reader:
        pixels = reader.read(whole(reader))
    # The last is at the corner; two of them touch.
    blocks, hidden = tiles((0, 2), (1, 2), (2, 5), (4, 6))
    damage(path, blocks, content)
    with open_raster(path) as plain, pytest.raises(ValueError):
        plain.read(whole(plain))
    with TolerantReader(open_raster(path)) as reader:
        assert isinstance(reader, RasterReader)
        assert reader.bad_blocks == []
        # Where nothing is damaged, too.
        check(reader, hidden, Window(0, 0, 60, 50), pixels)
        for _ in range(2):
            check(reader, hidden, pixels=pixels)
            assert reader.bad_blocks == [
                (0, Window(0, 128, 128, 64)),
                (0, Window(128, 320, 64, 64)),
                (0, Window(256, 384, 44, 36)),
            ]


def test_what_it_says_of_the_raster(path):
    reader = open_raster(path)
    meta = TolerantReader(reader).meta
    assert meta == dataclasses.replace(reader.meta, has_alpha=True)
    assert not meta.all_valid


def test_validity_of_the_raster_itself_is_kept(path):
    pixels = np.dstack([PIXELS, np.arange(WIDTH) % 2 * np.ones((HEIGHT, 1))])
    save(path, pixels.astype(np.uint8), extrasamples=['unassalpha'])
    blocks, hidden = tiles((1, 1))
    damage(path, blocks)
    with TolerantReader(open_raster(path)) as reader:
        read = reader.read(whole(reader))
        valid = reader.read_valid(whole(reader))
    assert np.array_equal(valid, ~hidden & (pixels[..., 3] > 0))
    assert np.array_equal(read[~hidden], PIXELS[~hidden])


@pytest.fixture
def decoded(monkeypatch):
    """The blocks that are decoded."""
    blocks = []
    decode = Page._decode

    def spy(self, index):
        blocks.append(index)
        return decode(self, index)

    monkeypatch.setattr(Page, '_decode', spy)
    return blocks


def test_a_damaged_block_is_tried_no_more(path, decoded):
    blocks, hidden = tiles((1, 2), (3, 3))
    damage(path, blocks)
    with TolerantReader(open_raster(path)) as reader:
        for row in range(0, HEIGHT, TILE):
            band = Window(row, 0, min(TILE, HEIGHT - row), WIDTH)
            check(reader, hidden, band)
        for index in blocks:
            assert 2 <= decoded.count(index) <= 8
        decoded.clear()
        again = pickle.loads(pickle.dumps(reader))
        for one in (reader, again):
            check(one, hidden)
            assert one.bad_blocks == reader.bad_blocks
        again.close()
    assert not set(decoded) & set(blocks)


@pytest.mark.parametrize('rows', [1, 5, 32, 100, 300])
def test_strips(path, rows):
    """Of many rows or few; a strip is damaged at its full width."""
    save(path, tile=None, rowsperstrip=rows)
    damage(path, [0, 299 // rows])
    with TolerantReader(open_raster(path)) as reader:
        high = rows if rows >= 16 else -(-16 // rows) * rows
        hidden = np.zeros((HEIGHT, WIDTH), bool)
        hidden[:high] = hidden[299 // high * high :] = True
        check(reader, hidden)
        whole_width = {(box.col, box.width) for _, box in reader.bad_blocks}
        assert whole_width == {(0, WIDTH)}


def test_a_mosaic_of_which_a_part_is_missing(tmp_path):
    pytest.importorskip('rasterio')
    left, right = PIXELS[:, :200, :1], PIXELS[:, 200:, :1]
    save(tmp_path / 'left.tif', left)
    save(tmp_path / 'right.tif', right)
    sources = ''.join(
        '<SimpleSource><SourceFilename relativeToVRT="1">'
        f'{name}.tif</SourceFilename><SourceBand>1</SourceBand>'
        f'<SrcRect xOff="0" yOff="0" xSize="{size}" ySize="{HEIGHT}"/>'
        f'<DstRect xOff="{col}" yOff="0" xSize="{size}" ySize="{HEIGHT}"/>'
        '</SimpleSource>'
        for name, col, size in (('left', 0, 200), ('right', 200, 220))
    )
    path = tmp_path / 'a.vrt'
    path.write_text(
        f'<VRTDataset rasterXSize="{WIDTH}" rasterYSize="{HEIGHT}">'
        f'<VRTRasterBand dataType="Byte" band="1">{sources}</VRTRasterBand>'
        '</VRTDataset>'
    )
    (tmp_path / 'right.tif').unlink()
    with TolerantReader(open_raster(path)) as reader:
        # Its blocks have 128 columns and rows.
        hidden = np.zeros((HEIGHT, WIDTH), bool)
        hidden[:, 128:] = True
        check(reader, hidden, pixels=PIXELS[..., :1])
        assert reader.bad_blocks == [(0, Window(0, 128, HEIGHT, WIDTH - 128))]


class Fake(WindowReader):
    """A raster of some size of which a few blocks fail, without a file."""

    def __init__(self, path, height, width, block, bad=(), errors=()):
        super().__init__(path)
        sizes = (height, width), (height // 2, width // 2)
        self.meta = RasterMeta(
            *(height, width, 1, np.dtype(np.uint16)),
            block_rows=block,
            level_sizes=sizes,
        )
        self.bad, self.errors = set(bad), list(errors)
        self.num_reads = self.num_closed = self.num_pixels = 0

    def values(self, level, window=None):
        window = window or Window(0, 0, *self.meta.level_sizes[level])
        rows = np.arange(window.row, window.row + window.height) * 31
        cols = np.arange(window.col, window.col + window.width) * 7
        ramp = np.add.outer(rows, cols) % 999 + 1 + level
        return ramp.astype(np.uint16)[..., None]

    def hidden(self, level):
        hidden = np.zeros(self.meta.level_sizes[level], bool)
        side = self.meta.block_rows
        for at, row, col in self.bad:
            if at == level:
                hidden[Window(row * side, col * side, side, side).slices] = 1
        return hidden

    def _load(self, window, level):
        self.num_reads += 1
        self.num_pixels = max(self.num_pixels, window.height * window.width)
        if self.errors:
            raise self.errors.pop(0)
        side = self.meta.block_rows
        for at, row, col in self.bad:
            block = Window(row * side, col * side, side, side)
            if at == level and min(block.intersect(window)[2:]) > 0:
                raise ValueError('bad')
        return self.values(level, window), None

    def close(self):
        super().close()
        self.num_closed += 1


@settings(deadline=None, max_examples=50)
@given(
    st.sets(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 6))
    ),
    st.lists(st.tuples(windows(150, 210), st.integers(0, 1)), max_size=6),
)
def test_any_damage_read_in_any_order(tmp_path_factory, bad, requests):
    path = tmp_path_factory.getbasetemp() / 'a.tif'
    path.touch()
    fake = Fake(path, 300, 420, 64, bad)
    with TolerantReader(fake) as reader:
        for window, level in [*requests, *requests]:
            expected = fake.hidden(level)
            pixels = np.where(expected[..., None], 0, fake.values(level))
            read = reader.read(window, level)
            assert np.array_equal(read, pixels[window.slices])
            valid = reader.read_valid(window, level)
            assert np.array_equal(valid, ~expected[window.slices])
        for level, size in enumerate(fake.meta.level_sizes):
            reader.read(Window(0, 0, *size), level)
            found = np.zeros(size, int)
            for at, window in reader.bad_blocks:
                if at == level:
                    assert window.clip(*size) == window
                    found[window.slices] += 1
            # All of it, and nothing twice.
            assert np.array_equal(found, fake.hidden(level))
        before = reader.bad_blocks
        reader.read(Window(0, 0, 300, 420))
        assert reader.bad_blocks == before


@pytest.mark.parametrize(
    ('window', 'times'),
    [(Window(10, 20, 200, 300), 1), (Window(10, 20, 30, 40), 2)],
)
def test_an_error_that_passes(path, window, times):
    error = OSError(errno.EIO, 'Input/output error', str(path))
    fake = Fake(path, 300, 420, 64, errors=[error] * times)
    with TolerantReader(fake) as reader:
        assert np.array_equal(
            reader.read(window), fake.values(0)[window.slices]
        )
        assert reader.read_valid(window).all()
        assert reader.bad_blocks == []
        # It was opened again.
        assert fake.num_closed == times


def test_little_is_tried_and_held(path):
    """Of a large window with one bad block in 5 rows of 12."""
    fake = Fake(path, 5 * 512, 12 * 512, 512, [(0, 3, 7)])
    with TolerantReader(fake) as reader:
        pixels = reader.read(whole(reader))
        assert (pixels == 0).sum() == 512**2
        assert fake.num_reads <= 30
        fake.num_reads = fake.num_pixels = 0
        reader.read(whole(reader))
        assert fake.num_pixels <= 2**20
        assert fake.num_reads <= 30


@pytest.mark.parametrize(
    'error',
    [
        FileNotFoundError(errno.ENOENT, 'No such file', 'a.tif'),
        PermissionError(errno.EACCES, 'Permission denied', 'a.tif'),
        OSError(errno.EMFILE, 'Too many open files', 'a.tif'),
        MemoryError('1 TB'),
    ],
)
def test_what_is_no_damage(path, error):
    fake = Fake(path, 300, 420, 64, errors=[error])
    with TolerantReader(fake) as reader, pytest.raises(type(error)) as caught:
        reader.read(Window(0, 0, 5, 5))
    assert getattr(caught.value, 'errno', None) == getattr(
        error, 'errno', None
    )
    assert reader.bad_blocks == []


@pytest.mark.parametrize('name', ['a.tif', 'a.npy'])
def test_a_file_that_went_away(tmp_path, name):
    path = tmp_path / name
    if name == 'a.tif':
        save(path)
    else:
        np.save(path, PIXELS)
    with TolerantReader(open_raster(path)) as reader:
        reader.read(Window(0, 0, 5, 5))
        reader.close()
        path.unlink()
        with pytest.raises(FileNotFoundError) as caught:
            reader.read(Window(0, 0, 5, 5))
        assert caught.value.filename == str(path)
        assert reader.bad_blocks == []
    # As a decoder that does not say why would have it.
    fake = Fake(path, 300, 420, 64, errors=[ValueError('damaged')])
    with TolerantReader(fake) as reader, pytest.raises(FileNotFoundError):
        reader.read(Window(0, 0, 5, 5))


def test_a_window_must_lie_within(path):
    with TolerantReader(open_raster(path)) as reader:
        for read in (reader.read, reader.read_valid):
            with pytest.raises(ValueError, match=r'a\.tif: a window of'):
                read(Window(0, 0, 5, WIDTH + 1))
            with pytest.raises(ValueError, match=r'a\.tif: has no level 1'):
                read(Window(0, 0, 5, 5), 1)
        assert reader.bad_blocks == []


def test_errors_name_file_level_and_window(path):
    blocks, _ = tiles((0, 2))
    damage(path, blocks)
    where = r'\(level 0, window 30x20 at \(5, 130\)\)$'
    with TiffReader(path) as reader:
        for read in (reader.read, reader.read_valid):
            if read == reader.read_valid:
                reader.meta = dataclasses.replace(reader.meta, has_alpha=True)
            with pytest.raises(
                ValueError, match=rf'a\.tif: is damaged[^\n]* {where}'
            ):
                read(Window(5, 130, 30, 20))
    error = OSError(errno.EIO, 'Input/output error', str(path))
    fake = Fake(path, 300, 420, 64, errors=[error])
    with pytest.raises(OSError) as caught:
        fake.read(Window(5, 6, 7, 8), 1)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(path)
    assert caught.value.strerror == (
        'Input/output error (level 1, window 7x8 at (5, 6))'
    )
