# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What stands beside a mask, and what the options on reading do to it."""

import json
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from PIL import Image

from infsa_seg.apis import infer_large, infer_large_image, init_model
from infsa_seg.apis.large.infer_large import expand

rasterio = pytest.importorskip('rasterio')
openslide = pytest.importorskip('openslide')
shapely = pytest.importorskip('shapely')
pyogrio = pytest.importorskip('pyogrio')

CLASSES = ['dark', 'bright', 'unseen']


@pytest.fixture(scope='module')
def model(project, trained):
    return init_model(project / 'tiny.py', trained / 'iter_30.pth')


def scene(height=160, width=240):
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 60, (height, width, 3))
    pixels[40:104, 32:128] += 150
    return pixels.astype(np.uint8)


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read(1)


def write_map(path, pixels, **options):
    """A GeoTIFF in UTM, pixels of 0.5 m."""
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        height=pixels.shape[0],
        width=pixels.shape[1],
        count=pixels.shape[2],
        dtype=pixels.dtype,
        crs='EPSG:32632',
        transform=rasterio.Affine(0.5, 0, 4e5, 0, -0.5, 5e6),
        **options,
    ) as dataset:
        dataset.write(np.moveaxis(pixels, 2, 0))


def write_slide(path, pixels, mpp=0.5):
    """A pyramid of two levels, of tiles, that says its resolution."""
    options = dict(
        tile=(64, 64),
        photometric='rgb',
        resolution=(1e4 / mpp, 1e4 / mpp),
        resolutionunit='CENTIMETER',
    )
    small = pixels[::2, ::2]
    with tifffile.TiffWriter(path) as writer:
        writer.write(pixels, subifds=1, **options)
        writer.write(small, subfiletype=1, **options)


def test_everything_for_a_map(model, tmp_path):
    """Each is read back by a library of its own."""
    write_map(tmp_path / 'a.tif', scene())
    result = infer_large_image(
        model,
        tmp_path / 'a.tif',
        tmp_path / 'out',
        polygons='gpkg',
        areas='json',
        style=True,
        manifest=True,
        cog=True,
    )
    paths = {path.name: path for path in result.written}
    assert sorted(paths) == sorted(
        p.name for p in (tmp_path / 'out').iterdir()
    )
    assert sorted(paths) == [
        *('a_areas.json', 'a_manifest.json', 'a_mask.qml', 'a_mask.tif'),
        'a_polygons.gpkg',
    ]
    mask = read(paths['a_mask.tif'])
    assert set(np.unique(mask)) == {0, 1}
    with rasterio.open(paths['a_mask.tif']) as dataset:
        assert dataset.crs.to_epsg() == 32632
        assert dataset.tags(ns='IMAGE_STRUCTURE')['LAYOUT'] == 'COG'
        tags = dataset.tags()
        weights = json.loads(tags['MODEL'])['weights_blake2b']
        assert json.loads(tags['OPTIONS'])['polygons'] == 'gpkg'

    # Polygons cover what the mask has, in its coordinates.
    meta, _, shapes, fields = pyogrio.raw.read(paths['a_polygons.gpkg'])
    assert meta['crs'] == 'EPSG:32632'
    columns = dict(zip(meta['fields'], fields, strict=True))
    for index in (0, 1):
        chosen = columns['class_id'] == index
        area = shapely.area(shapely.from_wkb(shapes[chosen])).sum()
        assert area == pytest.approx((mask == index).sum() * 0.25)
        assert columns['area_m2'][chosen].sum() == pytest.approx(area)
    bounds = shapely.total_bounds(shapely.from_wkb(shapes))
    assert bounds == pytest.approx((4e5, 5e6 - 80, 4e5 + 120, 5e6))

    areas = json.loads(paths['a_areas.json'].read_text())
    assert [row['class'] for row in areas] == CLASSES
    assert areas[1]['hectares'] == pytest.approx(
        (mask == 1).sum() * 0.25 / 1e4
    )
    entries = ElementTree.parse(paths['a_mask.qml']).iter('paletteEntry')
    assert [e.get('label') for e in entries][:3] == CLASSES
    manifest = json.loads(paths['a_manifest.json'].read_text())
    assert manifest['model']['weights_blake2b'] == weights
    assert manifest['input'].endswith('a.tif')
    assert manifest['summary']['valid'] == 1
    assert manifest['files']['mask'] == 'a_mask.tif'
    assert manifest['summary'] == json.loads(json.dumps(result.summary))


def test_everything_for_a_slide(model, tmp_path):
    """At another resolution; the mask opens as a slide of that."""
    pixels = np.repeat(np.repeat(scene(), 8, 0), 8, 1)
    write_slide(tmp_path / 'a.tif', pixels, 0.125)
    result = infer_large_image(
        model,
        tmp_path / 'a.tif',
        tmp_path / 'out',
        res='1um',
        polygons='geojson',
        areas='csv',
        overview=True,
    )
    mask = read(result.written[0])
    assert mask.shape == (160, 240)
    # As of the picture that it was made from.
    np.save(tmp_path / 'b.npy', scene())
    plain = infer_large_image(model, tmp_path / 'b.npy', tmp_path / 'b.tif')
    assert np.array_equal(mask, read(plain.written[0]))
    with openslide.OpenSlide(result.written[0]) as slide:
        assert slide.dimensions == (240, 160)
        assert float(slide.properties['openslide.mpp-x']) == pytest.approx(1)
    found = json.loads((tmp_path / 'out' / 'a_polygons.geojson').read_text())
    bright = [
        shapely.geometry.shape(feature['geometry'])
        for feature in found['features']
        if feature['properties']['classification']['name'] == 'bright'
    ]
    # In pixels of the full resolution.
    assert sum(s.area for s in bright) == (mask == 1).sum() * 64
    assert max(s.bounds[2] for s in bright) > 240
    table = (tmp_path / 'out' / 'a_areas.csv').read_text().splitlines()
    millimetres = float(table[2].rpartition(',')[2])
    assert millimetres == pytest.approx((mask == 1).sum() * 1e-6)


def test_a_level(model, tmp_path):
    write_slide(tmp_path / 'a.tif', scene(), 0.5)
    result = infer_large_image(
        model, tmp_path / 'a.tif', tmp_path / 'out.tif', level=1
    )
    np.save(tmp_path / 'b.npy', scene()[::2, ::2])
    plain = infer_large_image(model, tmp_path / 'b.npy', tmp_path / 'b.tif')
    assert np.array_equal(read(result.written[0]), read(plain.written[0]))


@pytest.mark.parametrize('size', [(40, 60), (160, 240)])
def test_glass_changes_nothing(model, size, tmp_path):
    """The same classes as without it, where tissue begins at a token."""
    pixels = scene()
    tissue = np.zeros((40, 60), np.uint8)
    tissue[10:26, 8:32] = 1
    side = size[0] // 40
    given = tissue.repeat(side, 0).repeat(side, 1)
    Image.fromarray(given).save(tmp_path / 'mask.png')
    np.save(tmp_path / 'a.npy', pixels)
    np.save(tmp_path / 'b.npy', pixels[40:104, 32:128])
    result = infer_large_image(
        model,
        tmp_path / 'a.npy',
        tmp_path / 'out',
        tissue=tmp_path / 'mask.png',
    )
    mask = read(result.written[0])
    plain = infer_large_image(model, tmp_path / 'b.npy', tmp_path / 'b.tif')
    assert np.array_equal(mask[40:104, 32:128], read(plain.written[0]))
    mask[40:104, 32:128] = 255
    assert (mask == 255).all()
    assert result.written[1].name == 'a_tissue.png'
    saved = np.array(Image.open(result.written[1]))
    assert saved.shape == size and saved.mean() == pytest.approx(0.16)
    assert result.summary['valid'] == pytest.approx(0.16)


def test_no_tissue_at_all(model, tmp_path):
    np.save(tmp_path / 'a.npy', np.full((64, 64, 3), 240, np.uint8))
    notes = []
    result = infer_large_image(
        model,
        tmp_path / 'a.npy',
        tmp_path / 'out',
        on_note=notes.append,
        tissue='auto',
        areas='csv',
    )
    assert (read(result.written[0]) == 255).all()
    assert notes == ['no tissue is there; nothing will be valid']
    assert result.summary['valid'] == 0 and result.plan is None


def test_damage_is_left_out_if_it_is_tolerated(model, tmp_path):
    """The rest is as if those pixels were nodata; else nothing is written."""
    pixels = scene(256, 384)
    path = tmp_path / 'a.tif'
    tifffile.imwrite(path, pixels, tile=(64, 64), compression='zlib')
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[7]
        nbytes = file.pages[0].databytecounts[7]
    content = bytearray(path.read_bytes())
    content[offset : offset + nbytes] = b'x' * nbytes
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r'a\.tif: .*level 0, window'):
        infer_large_image(model, path, tmp_path / 'out')
    assert not list((tmp_path / 'out').glob('*'))
    result = infer_large_image(
        model, path, tmp_path / 'out', tolerate_damage=True
    )
    mask = read(result.written[0])
    hole = np.zeros((256, 384), bool)
    hole[64:128, 64:128] = True
    assert np.array_equal(mask == 255, hole)
    assert result.summary['bad_blocks'] == [
        {'level': 0, 'window': [64, 64, 64, 64]}
    ]
    assert result.notes[-1].startswith('1 areas could not be read')
    empty = np.where(hole[..., None], -1, pixels.astype(np.int16))
    np.save(tmp_path / 'b.npy', empty)
    plain = infer_large_image(
        model, tmp_path / 'b.npy', tmp_path / 'b.tif', nodata=-1
    )
    assert np.array_equal(mask, read(plain.written[0]))


def test_values_of_another_scale(model, tmp_path):
    """They are pointed out; stretched, they give what others give."""
    pixels = scene().astype(np.float32)
    for name, values, is_odd in (
        ('bytes', pixels, False),
        ('shares', pixels / 255, True),
        ('counts', pixels * 40, True),
    ):
        np.save(tmp_path / f'{name}.npy', values)
        result = infer_large_image(
            model, tmp_path / f'{name}.npy', tmp_path / f'{name}.tif'
        )
        doubts = [note for note in result.notes if '--stretch' in note]
        assert bool(doubts) is is_odd
        low, high = result.summary['value_range']
        assert low == pytest.approx(values.min(), abs=float(values.max()) / 20)
        assert high == pytest.approx(float(values.max()), rel=0.05)
    masks = [
        read(
            infer_large_image(
                model,
                tmp_path / f'{name}.npy',
                tmp_path / f'{name}2.tif',
                stretch=(0, 100),
            ).written[0]
        )
        for name in ('bytes', 'shares', 'counts')
    ]
    assert all((mask == masks[0]).mean() > 0.999 for mask in masks)
    assert set(np.unique(masks[0])) == {0, 1}


def test_means_for_other_channels(project, tmp_path):
    model = init_model(
        project / 'tiny.py',
        None,
        'cpu',
        {
            'model.data_preprocessor.mean': [0.0] * 3,
            'model.data_preprocessor.std': [1.0] * 2,
        },
    )
    np.save(tmp_path / 'a.npy', scene())
    with pytest.raises(ValueError, match='std has 2 values for the 3 chan'):
        infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'a.tif')


def test_four_channels_in_any_order(project, tmp_path):
    """16 bits; the same as of a file that has them in the model's order."""
    model = init_model(
        project / 'tiny.py',
        None,
        'cpu',
        {
            'model.backbone.in_channels': 4,
            'model.data_preprocessor.mean': [100.0, 200.0, 300.0, 400.0],
            'model.data_preprocessor.std': [50.0] * 4,
        },
    )
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 900, (64, 72, 5)).astype(np.uint16)
    np.save(tmp_path / 'a.npy', pixels)
    np.save(tmp_path / 'b.npy', pixels[..., [4, 0, 3, 1]])
    one = infer_large_image(
        model,
        tmp_path / 'a.npy',
        tmp_path / 'a.tif',
        channels=[5, 1, 4, 2],
        probs='float16',
    )
    other = infer_large_image(
        model, tmp_path / 'b.npy', tmp_path / 'b.tif', probs='float16'
    )
    for path, same in zip(one.written, other.written, strict=True):
        with rasterio.open(path) as a, rasterio.open(same) as b:
            assert np.array_equal(a.read(), b.read())


@pytest.mark.parametrize('ending', ['geojson', 'gpkg'])
def test_polygons_of_a_part(model, ending, tmp_path):
    """Of a map with a collar on all sides."""
    pixels = scene()
    pixels[:24] = pixels[-8:] = 0
    pixels[:, :16] = pixels[:, -40:] = 0
    pixels[24:-8, 16:-40] += 1
    write_map(tmp_path / 'a.tif', pixels, nodata=0)
    result = infer_large_image(
        model, tmp_path / 'a.tif', tmp_path / 'out', polygons=ending
    )
    mask = read(result.written[0])
    meta, _, shapes, fields = pyogrio.raw.read(result.written[1])
    columns = dict(zip(meta['fields'], fields, strict=True))
    for index in (0, 1):
        area = columns['area_m2'][columns['class_id'] == index].sum()
        assert area == pytest.approx((mask == index).sum() * 0.25)
    bounds = shapely.total_bounds(shapely.from_wkb(shapes))
    assert bounds == pytest.approx((4e5 + 8, 5e6 - 76, 4e5 + 100, 5e6 - 12))


@pytest.mark.parametrize('kind', [KeyboardInterrupt, OSError])
def test_files_appear_together(model, kind, tmp_path, monkeypatch):
    """What fails at the very end leaves what was there, and no more."""

    def fail(*args, **kwargs):
        raise kind(28, 'No space left on device')

    np.save(tmp_path / 'a.npy', scene())
    out = tmp_path / 'out'
    everything = dict(
        polygons='geojson',
        areas='csv',
        style=True,
        manifest=True,
        overview=True,
        cog=True,
        overwrite=True,
    )
    infer_large_image(model, tmp_path / 'a.npy', out, **everything)
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert len(before) == 6
    monkeypatch.setattr('infsa_seg.raster.writer.copy_as_cog', fail)
    np.save(tmp_path / 'a.npy', scene()[::-1])
    with pytest.raises(kind):
        infer_large_image(model, tmp_path / 'a.npy', out, **everything)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(kind):
        infer_large_image(
            model, tmp_path / 'a.npy', tmp_path / 'new', **everything
        )
    assert not list((tmp_path / 'new').iterdir())


def test_what_is_read_is_not_replaced(model, tmp_path):
    write_map(tmp_path / 'a.tif', scene())
    Image.fromarray(np.ones((16, 24), np.uint8)).save(tmp_path / 'm_mask.tif')
    before = (tmp_path / 'a.tif').read_bytes()
    for source, out, options in (
        ('a.tif', tmp_path / 'a.tif', {}),
        ('m.npy', tmp_path, dict(tissue=tmp_path / 'm_mask.tif')),
    ):
        np.save(tmp_path / 'm.npy', scene())
        with pytest.raises(ValueError, match='is an input itself'):
            infer_large_image(
                model, tmp_path / source, out, overwrite=True, **options
            )
    assert (tmp_path / 'a.tif').read_bytes() == before


def test_infinity_is_no_value(model, tmp_path):
    """One pixel, and not the whole image."""
    pixels = scene().astype(np.float32)
    np.save(tmp_path / 'a.npy', pixels)
    pixels[50, 60, 1] = np.inf
    pixels[90, 9] = -np.inf
    np.save(tmp_path / 'b.npy', pixels)
    masks = []
    for name in 'ab':
        result = infer_large_image(
            model,
            tmp_path / f'{name}.npy',
            tmp_path / name,
            stretch=(0, 100),
            manifest=True,
        )
        masks.append(read(result.written[0]))
        json.loads(
            result.written[1].read_text(),
            parse_constant=lambda word: pytest.fail(word),
        )
    assert list(zip(*np.nonzero(masks[1] == 255), strict=True)) == [
        *((50, 60), (90, 9)),
    ]
    assert (masks[0] == masks[1]).mean() > 0.99


def test_another_mask_is_another_run(model, tmp_path):
    """A killed run does not go on with other tissue."""
    np.save(tmp_path / 'a.npy', scene())
    mask = np.ones((40, 60), np.uint8)
    Image.fromarray(mask).save(tmp_path / 'mask.png')

    class Killed(BaseException):
        pass

    bands = []

    def die(*args, **kwargs):
        bands.append(args)
        if len(bands) > 3:
            raise Killed

    options = dict(
        store='disk', band_rows=4, tissue=tmp_path / 'mask.png', resume=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('infsa_seg.execution.Journal.end', lambda self: None)
        patch.setattr(
            'infsa_seg.apis.large.mask_outputs.MaskOutputs.sink', die
        )
        with pytest.raises(Killed):
            infer_large_image(
                model, tmp_path / 'a.npy', tmp_path / 'out', **options
            )
    mask[8:30, 8:30] = 0
    Image.fromarray(mask).save(tmp_path / 'mask.png')
    with pytest.raises(ValueError, match='another resolution or tissue'):
        infer_large_image(
            model, tmp_path / 'a.npy', tmp_path / 'out', **options
        )


def test_a_verification_that_was_killed(model, tmp_path):
    """Its files are no reason to stop."""
    np.save(tmp_path / 'a.npy', scene())
    left = tmp_path / 'out' / '.a_mask.scratch.verify'
    left.mkdir(parents=True)
    (left / 'tokens.0').write_bytes(b'x')
    result = infer_large_image(
        model, tmp_path / 'a.npy', tmp_path / 'out', verify=8, store='disk'
    )
    assert result.difference < 1e-4
    assert not left.exists()


def test_results_beside_their_images_are_no_inputs(tmp_path):
    for name in ('a.tif', 'a_mask.tif', 'a_overview.png', 'b_mask.tif'):
        (tmp_path / name).write_bytes(b'x')
    found = [name.rpartition('/')[2] for name in expand([str(tmp_path)])]
    assert found == ['a.tif', 'b_mask.tif']


def test_one_class_is_pointed_out(model, tmp_path):
    np.save(tmp_path / 'a.npy', np.full((64, 64, 3), 20, np.uint8))
    result = infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'a.tif')
    assert result.summary['one_class'] == 'dark'
    assert any("all of it is 'dark'" in note for note in result.notes)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(res='1um'), 'a.npy: does not say its resolution'),
        (dict(res='1um', level=0), 'either res or level'),
        (dict(res='fine'), 'is no size of a pixel'),
        (dict(level=1), 'a.npy: has no level 1'),
        (dict(mpp_override=-1.0), 'mpp_override=-1.0'),
        (dict(stretch=(98, 2)), 'give two percentiles'),
        (dict(stretch=(2,)), 'give two percentiles'),
        (dict(reader='guess'), "reader='guess' is unknown"),
        (dict(reader='tifffile'), r'a\.npy: '),
        (dict(min_area=-1.0), 'min_area=-1.0'),
        (dict(polygons='shp'), "polygons='shp' is unknown"),
        (dict(tissue='missing.png'), r'missing\.png'),
    ],
)
def test_options_that_do_not_fit(model, options, words, tmp_path):
    """One line, and nothing is left behind."""
    np.save(tmp_path / 'a.npy', scene())
    with pytest.raises((ValueError, OSError), match=words) as caught:
        infer_large_image(
            model, tmp_path / 'a.npy', tmp_path / 'out', **options
        )
    assert '\n' not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) in (
        *(['a.npy'], ['a.npy', 'out']),
    )
    assert not list(tmp_path.glob('out/*'))


def test_notes_name_the_input(project, trained, tmp_path):
    np.save(tmp_path / 'a.npy', np.full((64, 64, 3), 20, np.uint8))
    shutil.copy(tmp_path / 'a.npy', tmp_path / 'b.npy')
    warned = []
    infer_large(
        project / 'tiny.py',
        str(trained / 'iter_30.pth'),
        [str(tmp_path)],
        tmp_path / 'out',
        say=lambda line: None,
        warn=warned.append,
    )
    assert len(warned) == 2
    assert warned[1].startswith(f'{tmp_path / "b.npy"}: all of it is')
