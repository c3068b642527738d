# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Levels of a pyramid, and how large a pixel is, in TIFF and through GDAL."""

import math
import os
import pickle

import numpy as np
import pytest

from infsa_seg.raster import Window, open_raster
from infsa_seg.raster.base import is_level
from infsa_seg.raster.resolution import (
    mpp_of_aperio,
    mpp_of_ome,
    mpp_of_tags,
    mpp_of_transform,
)

from .strategies import check_windows, noise, smooth, write_cog

tifffile = pytest.importorskip('tifffile')
rasterio = pytest.importorskip('rasterio')
pytest.importorskip('imagecodecs')
pytestmark = pytest.mark.filterwarnings('ignore:Dataset has no geotransform')

TILED = dict(tile=(64, 64), compression='zlib')
UTM = dict(
    crs='EPSG:32633',
    transform=rasterio.Affine(0.5, 0, 440720, 0, -0.25, 3751320),
)


def smaller(pixels, steps=(1, 2, 4)):
    return [np.ascontiguousarray(pixels[::n, ::n]) for n in steps]


def write_pages(path, levels, first=None, **how):
    """Levels as reduced pages after the first."""
    with tifffile.TiffWriter(path) as file:
        for place, pixels in enumerate(levels):
            extra = (first or {}) if not place else {'subfiletype': 1}
            file.write(pixels, metadata=None, **how, **extra)


def write_subifds(path, levels, metadata=None, **how):
    """Levels below the first."""
    with tifffile.TiffWriter(path, ome=metadata is not None) as file:
        file.write(
            levels[0], subifds=len(levels) - 1, metadata=metadata, **how
        )
        for pixels in levels[1:]:
            file.write(pixels, subfiletype=1, metadata=None, **how)


FULL = noise(301, 423, 3)
HOLES = noise(301, 423, dtype=np.float32)
HOLES[HOLES > 150] = np.nan
PYRAMIDS = {
    'reduced pages': (FULL, write_pages, dict(photometric='rgb', **TILED)),
    'strips': (FULL, write_pages, dict(photometric='rgb', rowsperstrip=9)),
    'sub-IFDs': (FULL, write_subifds, dict(photometric='rgb', **TILED)),
    'OME': (
        noise(301, 423, dtype=np.uint16) * 300,
        write_subifds,
        dict(photometric='minisblack', metadata={}, **TILED),
    ),
    'signed': (
        noise(301, 423, dtype=np.int16) * 300 - 30_000,
        write_pages,
        dict(photometric='minisblack', **TILED),
    ),
    'float': (HOLES, write_pages, dict(photometric='minisblack', **TILED)),
}


@pytest.mark.parametrize('reader', ['tifffile', 'rasterio'])
@pytest.mark.parametrize('name', PYRAMIDS)
def test_levels_of_a_pyramid(tmp_path, name, reader):
    stored, write, how = PYRAMIDS[name]
    levels = smaller(stored)
    write(tmp_path / 'a.tif', levels, **how)
    with open_raster(tmp_path / 'a.tif', reader=reader) as raster:
        sizes = tuple(level.shape[:2] for level in levels)
        if reader == 'rasterio' and 'write_subifds' in write.__name__:
            # GDAL does not look there for what tifffile writes.
            sizes = raster.meta.level_sizes
        assert raster.meta.level_sizes == sizes
        for level in (0, 2, 1, 0):
            if level >= len(sizes):
                continue
            expected = levels[level].reshape(*sizes[level], -1)
            valid = None
            if stored.dtype.kind == 'f':
                valid = ~np.isnan(expected[..., 0])
            check_windows(raster, level, expected, valid)
        with pytest.raises(ValueError, match=r'a\.tif: has no level 3'):
            raster.read(Window(0, 0, 1, 1), 3)


def test_what_is_kept_is_foreseen(tmp_path):
    write_pages(tmp_path / 'a.tif', smaller(FULL), photometric='rgb', **TILED)
    with open_raster(tmp_path / 'a.tif') as reader:
        blocks = {0: 7, 1: 4, 2: 2}
        tables = 80 * (7 * 5 + 4 * 3 + 2 * 2)
        assert reader.meta.nbytes_resident == 7 * 64 * 64 * 3 + tables
        for level in (1, 0, 2):
            height, width = reader.meta.level_sizes[level]
            reader.read(Window(0, 0, height, width), level)
            kept = [len(one.picture._blocks) for one in reader._levels]
            assert kept[level] == blocks[level] == sum(kept)
        again = pickle.loads(pickle.dumps(reader))
        window = Window(3, 4, 20, 30)
        expected = reader.read(window, 2)
    with again:
        assert np.array_equal(again.read(window, 2), expected)


@pytest.mark.parametrize('ome', [True, False], ids=['OME', 'pages'])
@pytest.mark.parametrize(
    'other',
    [
        noise(150, 211),
        noise(150, 211, 4),
        noise(150, 211, 3, dtype=np.uint16),
        noise(150, 180, 3),
        noise(400, 563, 3),
        noise(75, 105, 3),
    ],
    ids=[
        'grey',
        'channels',
        'type',
        'proportions',
        'larger',
        'smaller than next',
    ],
)
def test_what_is_no_level_is_left_out(tmp_path, other, ome):
    """Of what is below the first, tifffile takes all in OME, else some."""
    last = smaller(FULL)[2]
    left = 2 if other.shape[0] == 75 else 1
    with tifffile.TiffWriter(tmp_path / 'a.tif', ome=ome) as file:
        for place, pixels in enumerate((FULL, other, last)):
            file.write(
                pixels,
                photometric='rgb' if pixels.ndim == 3 else 'minisblack',
                extrasamples=[0] if pixels.shape[2:] == (4,) else None,
                subifds=0 if place else 2,
                subfiletype=1 if place else 0,
                metadata={} if ome and not place else None,
                **TILED,
            )
    with open_raster(tmp_path / 'a.tif') as reader:
        expected = other if left == 2 else last
        assert reader.meta.level_sizes == ((301, 423), expected.shape[:2])
        check_windows(reader, 1, expected)


def test_levels_of_another_palette_are_left_out(tmp_path):
    stored, random = noise(301, 423), np.random.default_rng(3)
    table = random.integers(0, 2**16, (3, 256)).astype(np.uint16)
    how = dict(photometric='palette', metadata=None, **TILED)
    with tifffile.TiffWriter(tmp_path / 'a.tif') as file:
        for place, pixels in enumerate(smaller(stored)):
            colours = table if place < 2 else table[::-1]
            kind = min(place, 1)
            file.write(pixels, colormap=colours, subfiletype=kind, **how)
    with open_raster(tmp_path / 'a.tif', nodata=7) as reader:
        half = smaller(stored)[1]
        assert reader.meta.level_sizes == ((301, 423), half.shape)
        expected = (table.T >> 8).astype(np.uint8)[half]
        check_windows(reader, 1, expected, half != 7)


@pytest.mark.parametrize(
    ('full', 'size', 'expected'),
    [
        ((1000, 1003), (252, 253), True),
        ((1000, 1003), (500, 501), True),
        ((1000, 1003), (500, 502), True),
        ((1000, 1003), (500, 540), False),
        ((1000, 1003), (1000, 1003), False),
        ((100_000, 50_000), (1563, 782), True),
        ((100_000, 50_000), (1563, 860), False),
        ((10, 5000), (1, 313), True),
        ((10, 5000), (1, 0), False),
    ],
)
def test_proportions_are_equal_but_for_rounding(full, size, expected):
    assert is_level(full, size) == expected


@pytest.mark.parametrize('reader', ['tifffile', 'rasterio'])
@pytest.mark.parametrize('masked', [True, False])
def test_overviews_and_masks_of_a_cog(tmp_path, reader, masked):
    valid = np.ones((300, 420), bool)
    valid[:100, :151] = False
    path = tmp_path / 'a.tif'
    pixels = noise(300, 420, 3) + np.uint8(1)
    if masked:
        write_cog(path, pixels, valid, **UTM)
    else:
        pixels[~valid] = 0
        write_cog(path, pixels, nodata=0, **UTM)
    with open_raster(path, reader=reader) as raster:
        meta = raster.meta
        assert meta.level_sizes == ((300, 420), (150, 210), (75, 105))
        assert meta.has_alpha == masked
        assert meta.nodata == (None if masked else 0)
        assert meta.mpp == pytest.approx((0.25e6, 0.5e6))
        for level in (0, 1, 2):
            how = {'overview_level': level - 1} if level else {}
            with rasterio.open(path, **how) as file:
                expected = np.moveaxis(file.read(), 0, 2)
                mask = file.dataset_mask() > 0
            assert not mask.all() and mask.any()
            check_windows(raster, level, expected, mask)


def test_a_level_without_mask_is_valid(tmp_path):
    mask = noise(301, 423) > 100
    with tifffile.TiffWriter(tmp_path / 'a.tif') as file:
        how = dict(metadata=None, **TILED)
        file.write(FULL, photometric='rgb', **how)
        half = smaller(FULL)[1]
        file.write(half, photometric='rgb', subfiletype=1, **how)
        file.write(mask, photometric='mask', subfiletype=4, **how)
    with open_raster(tmp_path / 'a.tif') as reader:
        check_windows(reader, 0, FULL, mask)
        check_windows(reader, 1, half, np.ones(half.shape[:2], bool))
    with open_raster(tmp_path / 'a.tif', nodata=half[0, 0, 0]) as reader:
        told = reader.read_valid(Window(0, 0, *half.shape[:2]), 1)
    assert np.array_equal(told, (half != half[0, 0, 0]).any(2))


@pytest.mark.parametrize('internal', [True, False])
def test_the_mask_beside_a_file(tmp_path, internal):
    mask = noise(40, 50) > 100
    path = tmp_path / 'a.tif'
    form = dict(height=40, width=50, count=1, dtype='uint16')
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal),
        rasterio.open(path, 'w', 'GTiff', **form) as file,
    ):
        stored = noise(40, 50, dtype=np.uint16) * 300
        file.write(stored, 1)
        file.write_mask(mask)
    assert os.path.exists(tmp_path / 'a.tif.msk') != internal
    with open_raster(path, reader='rasterio') as reader:
        assert reader.meta.has_alpha
        check_windows(reader, 0, stored[..., None], mask)


def test_a_palette_through_gdal(tmp_path):
    stored = noise(40, 50)
    random = np.random.default_rng(3)
    colours = random.integers(0, 256, (256, 4))
    colours[:, 3] = random.integers(0, 2, 256) * 255
    path = tmp_path / 'a.png'
    form = dict(height=40, width=50, count=1, dtype='uint8')
    with rasterio.open(path, 'w', 'PNG', **form) as file:
        file.write(stored, 1)
        file.write_colormap(1, dict(enumerate(map(tuple, colours.tolist()))))
    opaque = colours[stored, 3] > 0
    with open_raster(path, reader='rasterio') as reader:
        assert (reader.meta.channels, reader.meta.dtype) == (3, np.uint8)
        check_windows(reader, 0, colours[stored, :3].astype('u1'), opaque)
    with open_raster(path, 7, reader='rasterio') as reader:
        told = reader.read_valid(Window(0, 0, 40, 50))
    assert np.array_equal(told, opaque & (stored != 7))
    with open_raster(path, indexed=True, reader='rasterio') as reader:
        check_windows(reader, 0, stored[..., None])


@pytest.mark.parametrize('steps', [(1, 2), (1, 2, 4)])
def test_jpeg_has_overviews_for_gdal(tmp_path, steps):
    pytest.importorskip('cv2').imwrite(
        str(tmp_path / 'a.jpg'), smooth(600, 801)
    )
    with open_raster(tmp_path / 'a.jpg', reader='rasterio') as reader:
        level = len(steps) - 1
        size = reader.meta.level_sizes[level]
        assert size == (math.ceil(600 / steps[-1]), math.ceil(801 / steps[-1]))
        with rasterio.open(
            tmp_path / 'a.jpg', overview_level=level - 1
        ) as file:
            check_windows(reader, level, np.moveaxis(file.read(), 0, 2))


@pytest.mark.parametrize(
    ('dtype', 'change'),
    [('u1', 0), ('u2', 300), ('i2', -150), ('f4', 1e6), ('u4', 10**7)],
)
@pytest.mark.parametrize('reader', ['tifffile', 'rasterio', 'numpy'])
def test_values_are_as_stored(tmp_path, reader, dtype, change):
    stored = noise(40, 50).astype(dtype) * np.array(change or 1).astype(dtype)
    if reader == 'numpy':
        np.save(tmp_path / 'a.npy', stored)
        path = tmp_path / 'a.npy'
    else:
        path = tmp_path / 'a.tif'
        tifffile.imwrite(path, stored, metadata=None, **TILED)
    with open_raster(path, reader=reader) as raster:
        pixels = raster.read(Window(0, 0, 40, 50))
    assert pixels.dtype == np.dtype(dtype)
    assert np.array_equal(pixels[..., 0], stored)


@pytest.mark.parametrize(
    ('x', 'y', 'unit', 'expected'),
    [
        ((96, 1), (72, 1), 2, (25400 / 72, 25400 / 96)),
        ((200_400_801, 10_000), (20040, 1), 3, (0.49900, 0.499)),
        ((1_000_000, 3), (1_000_000, 3), 3, (0.03, 0.03)),
        ('20040.08', '(20040.08)', '3 (pixels/cm)', None),
        ('20040.08', '20040.08', '3 (pixels/cm)', (0.499, 0.499)),
        ((96, 1), (96, 1), 1, None),
        ((96, 1), (96, 1), None, None),
        ((96, 1), (96, 1), 7, None),
        (None, (96, 1), 2, None),
        ((96, 1), None, 2, None),
        ((0, 1), (96, 1), 2, None),
        ((96, 0), (96, 1), 2, None),
        ((0, 0), (0, 0), 2, None),
        ((-96, 1), (-96, 1), 2, None),
        ((1, 1), (1, 1), 2, None),
        ((2**32 - 1, 1), (2**32 - 1, 1), 3, None),
        (math.nan, math.nan, 2, None),
        (math.inf, 1, 2, None),
        ('much', 'much', 2, None),
        ((96,), (96,), 2, None),
    ],
)
def test_resolution_tags(x, y, unit, expected):
    found = mpp_of_tags(x, y, unit)
    assert found == (expected and pytest.approx(expected, rel=1e-4))


def ome(**sizes):
    text = ' '.join(f'{name}="{value}"' for name, value in sizes.items())
    return (
        '<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.'
        'openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        f'<Pixels ID="Pixels:0" {text}/></Image></OME>'
    )


@pytest.mark.parametrize(
    ('unit', 'length'),
    [
        (None, 1),
        ('µm', 1),
        ('\u03bcm', 1),
        ('nm', 1e-3),
        ('mm', 1e3),
        ('cm', 1e4),
        ('in', 25400),
        ('Å', 1e-4),
        ('pixel', None),
        ('reference frame', None),
    ],
)
def test_sizes_of_ome(unit, length):
    units = {f'PhysicalSize{axis}Unit': unit for axis in 'XY' if unit}
    found = mpp_of_ome(ome(PhysicalSizeX=0.25, PhysicalSizeY=0.125, **units))
    if length is None:
        assert found is None
    else:
        expected = (0.125 * length, 0.25 * length)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    'text',
    [
        None,
        '',
        'no XML',
        '<OME/>',
        ome(),
        ome(PhysicalSizeX=1),
        ome(PhysicalSizeX=0, PhysicalSizeY=0),
        ome(PhysicalSizeX=-1, PhysicalSizeY=1),
        ome(PhysicalSizeX='NaN', PhysicalSizeY='NaN'),
        ome(PhysicalSizeX='INF', PhysicalSizeY='INF'),
    ],
)
def test_ome_that_says_nothing(text):
    assert mpp_of_ome(text) is None


def test_what_aperio_says():
    about = 'Aperio Image Library v12\r\n9x9|AppMag = 20|MPP = 0.4990|X = 1'
    assert mpp_of_aperio(about) == (0.499, 0.499)
    assert mpp_of_aperio('Aperio Image Library|AppMag = 20') is None
    assert mpp_of_aperio('Aperio Image Library|MPP = 0') is None
    assert mpp_of_aperio('x|MPP = 0.4990') is None


def test_coordinates_say_how_large_a_pixel_is():
    turned = rasterio.Affine.rotation(30) @ rasterio.Affine.scale(2, 3)
    found = mpp_of_transform(tuple(turned)[:6], 0.3048)
    assert found == pytest.approx((3 * 304_800, 2 * 304_800))
    assert mpp_of_transform(None, 1.0) is None
    assert mpp_of_transform((1, 0, 0, 0, -1, 0), None) is None
    assert mpp_of_transform((0, 0, 0, 0, -1, 0), 1.0) is None


@pytest.mark.parametrize('reader', ['tifffile', 'rasterio'])
@pytest.mark.parametrize(
    ('crs', 'expected'),
    [
        ('EPSG:32633', (3e6, 2e6)),
        ('EPSG:2263', (3e6 * 1200 / 3937, 2e6 * 1200 / 3937)),
        ('EPSG:4326', None),
        (None, (0.5, 1.0)),
    ],
    ids=['metres', 'feet', 'degrees', 'tags only'],
)
def test_coordinates_come_before_tags(tmp_path, reader, crs, expected):
    path = tmp_path / 'a.tif'
    form = dict(height=4, width=5, count=1, dtype='uint8')
    with rasterio.open(path, 'w', 'GTiff', **form) as file:
        file.write(np.ones((1, 4, 5), np.uint8))
        if crs:
            file.crs = crs
            file.transform = rasterio.Affine(2, 0, 9, 0, -3, 8)
        file.update_tags(
            TIFFTAG_XRESOLUTION='10000',
            TIFFTAG_YRESOLUTION='20000',
            TIFFTAG_RESOLUTIONUNIT='3',
        )
    with open_raster(path, reader=reader) as raster:
        found = raster.meta.mpp
    assert found == (expected and pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize(
    ('x', 'unit', 'expected'),
    [
        ((200_400_801, 10_000), 3, 0.499),
        ((300, 1), 2, 25400 / 300),
        ((300, 1), 1, None),
        ((0, 1), 2, None),
    ],
)
def test_resolution_of_a_file(tmp_path, x, unit, expected):
    how = dict(resolution=(x, x), resolutionunit=unit, photometric='rgb')
    write_pages(tmp_path / 'a.tif', smaller(FULL), how, **TILED)
    with open_raster(tmp_path / 'a.tif') as reader:
        assert len(reader.meta.level_sizes) == 3
        found = reader.meta.mpp
    expected = expected and pytest.approx((expected, expected), rel=1e-5)
    assert found == expected


@pytest.mark.parametrize(('size', 'unit'), [(250, 'nm'), (0.25, 'µm')])
def test_ome_comes_before_tags(tmp_path, size, unit):
    about = {
        f'PhysicalSize{axis}{end}': value
        for axis in 'XY'
        for end, value in (('', size), ('Unit', unit))
    }
    how = dict(photometric='rgb', resolution=(96, 96), resolutionunit=2)
    write_subifds(
        tmp_path / 'a.ome.tif',
        smaller(FULL),
        {'axes': 'YXS', **about},
        **how,
        **TILED,
    )
    with open_raster(tmp_path / 'a.ome.tif') as reader:
        assert reader.meta.mpp == pytest.approx((0.25, 0.25))
        assert len(reader.meta.level_sizes) == 3


def test_levels_of_a_real_cog(shared):
    path = shared / 'data/raster/cogeo.tif'
    with open_raster(path) as reader:
        assert len(reader.meta.level_sizes) == 7
        for level in range(1, 7):
            with (
                rasterio.open(path, overview_level=level - 1) as file,
                tifffile.TiffFile(path) as pages,
            ):
                mask = file.dataset_mask() > 0
                expected = pages.series[0].levels[level].asarray()
            check_windows(reader, level, expected, mask)
