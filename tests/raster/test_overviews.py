# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pyramids and COG, as GDAL, tifffile and OpenSlide read them."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infsa_seg.raster import (
    Georeference,
    GeoTiffWriter,
    open_raster,
    output_nbytes,
)
from infsa_seg.raster import layout as layout_module
from infsa_seg.raster.layout import level_factors, level_sizes, most_nbytes

from .strategies import noise, whole

rasterio = pytest.importorskip('rasterio')
tifffile = pytest.importorskip('tifffile')
openslide = pytest.importorskip('openslide')
pytestmark = pytest.mark.filterwarnings('ignore:Dataset has no geotransform')

HEIGHT, WIDTH = 1111, 1500
# Classes that averages would fall between, in fields of 100 pixels.
CLASSES = np.array([0, 3, 200], np.uint8)[
    np.add.outer(np.arange(HEIGHT) // 100, np.arange(WIDTH) // 100) % 3
]
PALETTE = [(40 * i % 256, 255 - i, 7) for i in range(201)]
NAMES = [f'class {i}' for i in range(201)]
FORMS = [{'pyramid': True}, {'cog': True}]


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'a.tif'


def write(path, pixels, **settings):
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    height, width = pixels.shape[:2]
    with GeoTiffWriter(
        path, height, width, channels, pixels.dtype, **settings
    ) as writer:
        for row in range(0, height, 300):
            writer.write(row, pixels[row : row + 300])


def levels_of(path):
    """(channels, height, width) of each level, as GDAL reads them."""
    with rasterio.open(path) as file:
        yield file.read()
        number = len(file.overviews(1))
    for level in range(number):
        with rasterio.open(path, overview_level=level) as file:
            yield file.read()


@given(
    st.integers(1, 10**7), st.integers(1, 10**7), st.sampled_from([16, 1024])
)
def test_halves_until_it_is_small(height, width, tile):
    sizes = level_sizes(height, width, tile)
    factors = level_factors(height, width, tile)
    assert factors == [2**level for level in range(1, len(sizes))]
    assert sizes[0] == (height, width)
    limit = max(tile, 512)
    assert max(sizes[-1]) <= limit
    assert all(max(size) > limit for size in sizes[:-1])
    assert sizes[-1][0] == -(-height // 2 ** len(factors))


@pytest.mark.parametrize('form', FORMS)
def test_a_class_map_stays_one(path, form):
    write(path, CLASSES, palette=PALETTE, nodata=255, **form)
    assert os.listdir(path.parent) == ['a.tif']
    levels = list(levels_of(path))
    assert [level.shape[1:] for level in levels] == [
        (1111, 1500),
        (556, 750),
        (278, 375),
    ]
    assert np.array_equal(levels[0][0], CLASSES)
    for level, pixels in enumerate(levels):
        assert set(np.unique(pixels)) == {0, 3, 200}
        # A pixel lies where the one that it stands for lies.
        factor = 2**level
        rows = np.arange(pixels.shape[1]) * factor + factor // 2
        cols = np.arange(pixels.shape[2]) * factor + factor // 2
        inner = np.ix_(
            np.flatnonzero((rows % 100 > 4) & (rows % 100 < 95)),
            np.flatnonzero((cols % 100 > 4) & (cols % 100 < 95)),
        )
        at = np.minimum(rows, HEIGHT - 1), np.minimum(cols, WIDTH - 1)
        expected = CLASSES[np.ix_(*at)]
        assert np.array_equal(pixels[0][inner], expected[inner])


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('palette', [PALETTE, None])
def test_openslide_shows_it(path, form, palette):
    """By its palette at every level, with pixels of the right size."""
    write(path, CLASSES, palette=palette, mpp=(0.498123, 0.2517), **form)
    colours = np.array(palette or [(i,) * 3 for i in range(201)], np.uint8)
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1500, 1111), (750, 556), (375, 278))
        assert float(slide.properties['openslide.mpp-x']) == pytest.approx(
            0.2517, rel=1e-6
        )
        assert float(slide.properties['openslide.mpp-y']) == pytest.approx(
            0.498123, rel=1e-6
        )
        for level, pixels in enumerate(levels_of(path)):
            size = slide.level_dimensions[level]
            shown = np.asarray(slide.read_region((0, 0), level, size))
            assert np.array_equal(shown[..., :3], colours[pixels[0]])
            assert shown[..., 3].min() == 255


@pytest.mark.parametrize('dtype', [np.float32, np.float16, np.uint32])
def test_what_openslide_refuses(path, dtype):
    write(path, CLASSES.astype(dtype), pyramid=True)
    with (
        openslide.OpenSlide(path) as slide,
        pytest.raises(openslide.OpenSlideError, match='can not handle'),
    ):
        slide.read_region((0, 0), 0, (5, 5))


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
@pytest.mark.parametrize('channels', [2, 3, 4, 5])
def test_no_channel_is_taken_for_an_opacity(path, form, dtype, channels):
    pixels = noise(20, 600, channels, dtype=dtype)
    write(path, pixels, **form)
    with open_raster(path) as reader:
        assert np.array_equal(reader.read(whole(reader)), pixels)
        assert reader.meta.all_valid
    with rasterio.open(path) as file:
        layout = file.tags(ns='IMAGE_STRUCTURE').get('LAYOUT')
        assert layout == ('COG' if 'cog' in form else None)
        assert 'alpha' not in {kind.name for kind in file.colorinterp}


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.floats(-5, 7), st.floats(-5, 7))
def test_the_resolution_is_read_back(path, down, across):
    down, across = 10**down, 10**across
    write(path, CLASSES[:5, :9], mpp=(down, across), overwrite=True)
    with tifffile.TiffFile(path) as file:
        tags = file.pages[0].tags
        assert tags['ResolutionUnit'].value == 3
        for name, mpp in (('XResolution', across), ('YResolution', down)):
            above, below = tags[name].value
            assert 1e4 * below / above == pytest.approx(mpp, rel=5e-7)


@pytest.mark.parametrize(
    'mpp', [(0, 1), (1, -1), (1, np.nan), (np.inf, 1), (1e8, 1)]
)
def test_no_resolution(path, mpp):
    with pytest.raises(ValueError, match=r'a\.tif: mpp=.* must be two'):
        GeoTiffWriter(path, 5, 5, mpp=mpp)
    assert not os.listdir(path.parent)


@pytest.mark.parametrize(
    ('dtype', 'compress'),
    [
        ('uint8', 'deflate'),
        ('uint8', 'none'),
        ('uint16', 'lzw'),
        ('float16', 'deflate'),
        ('float32', 'none'),
        ('float64', 'zstd'),
    ],
)
@pytest.mark.parametrize('channels', [1, 3, 6])
@pytest.mark.parametrize('form', FORMS)
def test_every_type(path, compress, dtype, channels, form):
    pixels = noise(70, 600, channels, dtype=dtype)
    write(path, pixels, compress=compress, tile=128, **form)
    full, half = levels_of(path)
    assert np.array_equal(full, np.moveaxis(pixels, 2, 0))
    assert half.shape == (channels, 35, 300)
    # Every pixel is one of the four that it stands for.
    fours = full.reshape(channels, 35, 2, 300, 2)
    assert (fours == half[:, :, None, :, None]).any((2, 4)).all()
    with rasterio.open(path) as file:
        profile = file.profile
        assert profile.get('compress', 'none') == compress
        assert profile['blockxsize'] == profile['blockysize'] == 128
        predicted = dtype.startswith('float') and compress != 'none'
        tags = file.tags(ns='IMAGE_STRUCTURE')
        assert tags.get('PREDICTOR') == ('3' if predicted else None)
        bits = file.tags(1, ns='IMAGE_STRUCTURE').get('NBITS')
        assert bits == ('16' if dtype == 'float16' else None)
    assert os.listdir(path.parent) == ['a.tif']


@pytest.mark.parametrize('size', [(1, 1), (1, 5), (17, 300), (300, 513)])
@pytest.mark.parametrize('form', FORMS)
def test_small_rasters(path, size, form):
    pixels = noise(*size)
    write(path, pixels, **form)
    levels = list(levels_of(path))
    assert len(levels) == (2 if size == (300, 513) else 1)
    assert np.array_equal(levels[0][0], pixels)


def test_cog(path):
    """In the order of COG, with all that a plain file has."""
    crs = rasterio.crs.CRS.from_epsg(32633)
    transform = (0.5, 0.1, 4e5, 0.2, -0.6, 5e6)
    write(
        path,
        CLASSES,
        cog=True,
        palette=PALETTE,
        class_names=NAMES,
        nodata=255,
        mpp=(0.5, 0.25),
        metadata={'SOFTWARE': 'wäre'},
        georeference=Georeference(crs.to_wkt(), transform),
    )
    with rasterio.open(path) as file:
        assert file.tags(ns='IMAGE_STRUCTURE')['LAYOUT'] == 'COG'
        assert file.crs == crs
        assert tuple(file.transform)[:6] == transform
        assert file.nodata == 255
        colours = file.colormap(1)
        assert [colours[i][:3] for i in range(201)] == PALETTE
        tags = file.tags()
    assert tags['SOFTWARE'] == 'wäre'
    assert json.loads(tags['CLASS_NAMES']) == NAMES
    assert float(tags['TIFFTAG_XRESOLUTION']) == 40000
    assert float(tags['TIFFTAG_YRESOLUTION']) == 20000
    # All tables at the start; then pixels, the smallest level first.
    with tifffile.TiffFile(path) as file:
        tables = [page.offset for page in file.pages]
        starts = [min(page.dataoffsets) for page in file.pages]
    assert tables == sorted(tables)
    assert starts == sorted(starts, reverse=True)
    assert max(tables) < min(starts)


@pytest.mark.parametrize('compress', ['none', 'deflate'])
@pytest.mark.parametrize('form', FORMS)
def test_each_block_of_each_level_is_written_once(path, compress, form):
    """What is written again leaves a hole, as tables that grow do."""
    write(path, noise(1300, 1700), tile=128, compress=compress, **form)
    with tifffile.TiffFile(path) as file:
        blocks = sorted(
            block
            for page in file.pages
            for block in zip(
                page.dataoffsets, page.databytecounts, strict=True
            )
        )
    used = sum(nbytes for _, nbytes in blocks)
    ends = [start + nbytes for start, nbytes in blocks]
    starts = [start for start, _ in blocks[1:]]
    assert all(a <= b for a, b in zip(ends, starts, strict=False))
    # Of each block its offset and size, and COG says its size twice more.
    tables = len(blocks) * 16 + 4096
    assert path.stat().st_size - used <= tables


@pytest.mark.parametrize('compress', ['deflate', 'lzw', 'zstd', 'none'])
@pytest.mark.parametrize('tile', [16, 240, 256])
@pytest.mark.parametrize('form', [{}, *FORMS])
def test_no_file_is_larger_than_foreseen(
    path, monkeypatch, compress, tile, form
):
    monkeypatch.setattr(layout_module, '_NBYTES_OF_TAGS', 4096)
    if 'cog' in form:
        tile = max(tile, 128)
    pixels = np.random.default_rng(0).integers(0, 256, (256, 1280, 2))
    write(path, pixels.astype(np.uint8), compress=compress, tile=tile, **form)
    sizes = level_sizes(256, 1280, tile) if form else [(256, 1280)]
    nbytes = most_nbytes(sizes, 2, tile, compress)
    assert path.stat().st_size <= nbytes
    if compress == 'none' and tile == 256:
        assert nbytes < 1.3 * path.stat().st_size


@pytest.mark.parametrize('form', [{}, *FORMS])
@pytest.mark.parametrize('spare', [-1, 0])
def test_bigtiff_if_the_pyramid_needs_it(path, monkeypatch, form, spare):
    sizes = level_sizes(1111, 1500, 256) if form else [(1111, 1500)]
    limit = most_nbytes(sizes, 1, 256, 'deflate') + spare
    monkeypatch.setattr(layout_module, '_CLASSIC_NBYTES', limit)
    write(path, CLASSES, **form)
    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff == (spare < 0)


def test_cog_needs_larger_tiles(path):
    with pytest.raises(ValueError, match=r'a\.tif: tile=112 is too small'):
        GeoTiffWriter(path, 5, 5, tile=112, cog=True)
    assert not os.listdir(path.parent)


def test_bytes_on_the_disk():
    plain = output_nbytes(1111, 1500, 3, np.uint16)
    assert plain == 1111 * 1500 * 6
    more = (556 * 750 + 278 * 375) * 6
    assert output_nbytes(1111, 1500, 3, 'uint16', pyramid=True) == plain + more
    assert output_nbytes(1111, 1500, 3, 'uint16', cog=True) == 2 * (
        plain + more
    )


@pytest.mark.parametrize('form', FORMS)
def test_the_cache_of_gdal_is_capped_at_the_end(path, monkeypatch, form):
    env = pytest.importorskip('rasterio._env')
    caps = []

    def spy(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            caps.append((name, env.get_gdal_config('GDAL_CACHEMAX')))
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(rasterio, 'open')
    spy(rasterio.shutil, 'copy')
    with GeoTiffWriter(path, HEIGHT, WIDTH, **form) as writer:
        writer.write(0, CLASSES)
        caps.clear()
    # What reads georeferences opens it, too.
    assert caps[0] == ('open', 2**26)
    assert ('copy' in dict(caps)) == ('cog' in form)
    assert {cap for _, cap in caps} == {2**26}


@pytest.mark.parametrize(
    ('form', 'limit'),
    [(FORMS[0], 1_750_000), (FORMS[1], 1_750_000), (FORMS[1], 2_250_000)],
)
def test_a_full_disk_at_the_end(path, monkeypatch, form, limit):
    """Rows find place, but not the overviews, or not the copy."""
    resource = pytest.importorskip('resource')
    usage = type('Usage', (), {'free': 100})
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    if limit > 2_000_000:
        from infsa_seg.raster import writer as module

        copy = module.copy_as_cog

        def copy_with_less(*args):
            resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, limits[1]))
            copy(*args)

        monkeypatch.setattr(module, 'copy_as_cog', copy_with_less)
    path.write_text('as it was')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH))
    try:
        with (
            pytest.raises(OSError) as caught,
            GeoTiffWriter(
                path, HEIGHT, WIDTH, overwrite=True, **form
            ) as writer,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            writer.write(0, pixels.astype(np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert os.listdir(path.parent) == ['a.tif']
    assert path.read_text() == 'as it was'


@pytest.mark.parametrize('form', FORMS)
def test_an_interruption_at_the_end(path, monkeypatch, form):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(rasterio.shutil, 'copy', interrupt)
    monkeypatch.setattr(
        'infsa_seg.raster.writer.build_overviews',
        interrupt if 'pyramid' in form else lambda *_: None,
    )
    monkeypatch.setattr(GeoTiffWriter, '_check_blocks', lambda *_: None)
    with (
        pytest.raises(KeyboardInterrupt),
        GeoTiffWriter(path, HEIGHT, WIDTH, **form) as writer,
    ):
        writer.write(0, CLASSES)
    assert not os.listdir(path.parent)


@pytest.mark.parametrize('form', FORMS)
def test_levels_that_are_missing_are_noticed(path, monkeypatch, form):
    monkeypatch.setattr(
        'infsa_seg.raster.writer.build_overviews', lambda *_: None
    )
    with pytest.raises(OSError, match='blocks are missing'):
        write(path, CLASSES, **form)
    assert not os.listdir(path.parent)


MEMORY = """
import sys
import numpy as np
from infsa_seg.raster import GeoTiffWriter

path, form = sys.argv[1:]
height, width, channels = 1400, 36_000, 5
rows = np.random.default_rng(0).integers(0, 9, (50, width, channels), 'uint8')


def peak():
    with open('/proc/self/status') as file:
        return int(file.read().split('VmHWM:')[1].split()[0]) * 1024


with GeoTiffWriter(path, 8, 600, 5, pyramid=True) as writer:
    writer.write(0, np.zeros((8, 600, 5), np.uint8))
before = peak()
with GeoTiffWriter(
    path, height, width, channels, overwrite=True, compress='none',
    **{form: True},
) as writer:
    for row in range(0, height, 50):
        writer.write(row, rows)
    held = writer.nbytes_resident
print(peak() - before, held)
"""


@pytest.mark.slow
@pytest.mark.parametrize('form', ['pyramid', 'cog'])
def test_memory(path, form):
    """Of a file of 250 MB, whose rows of tiles are small."""
    if not os.path.exists('/proc/self/status'):
        pytest.skip('reads the memory of the process as Linux has it')
    found = subprocess.run(
        [sys.executable, '-c', MEMORY, path, form],
        check=True,
        capture_output=True,
        text=True,
    )
    # Libraries may have had something to say before.
    peak, held = map(int, found.stdout.splitlines()[-1].split())
    assert held == 2**26 + 48 * 2**20
    assert peak < held
