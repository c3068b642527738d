# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Large images from file to file."""

import csv
import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from infsa_seg.apis import (
    evaluate,
    infer_large,
    infer_large_image,
    init_model,
    plan_large_image,
)
from infsa_seg.apis.large import LargeOptions, open_source
from infsa_seg.apis.large.infer_large import _cast, expand
from infsa_seg.apis.large.raster_image import strips_of
from infsa_seg.raster import RasterMeta, Window, open_raster

rasterio = pytest.importorskip('rasterio')


@pytest.fixture(scope='module')
def model(project, trained):
    return init_model(project / 'tiny.py', trained / 'iter_30.pth')


def picture(height=70, width=90):
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 60, (height, width, 3))
    pixels[20:50, 30:] += 150
    return pixels.astype(np.uint8)


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.mark.filterwarnings('ignore:Dataset has no geotransform')
def test_files_say_what_they_are(model, tmp_path):
    image = picture()
    cv2.imwrite(str(tmp_path / 'a.png'), image[..., ::-1])
    result = infer_large_image(
        model,
        tmp_path / 'a.png',
        tmp_path / 'out',
        band_rows=2,
        probs='float16',
        centrality=True,
        overview=True,
        verify=9,
    )
    names = ['a_mask.tif', 'a_probs.tif', 'a_centrality.tif', 'a_overview.png']
    assert [path.name for path in result.written] == names
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == sorted(
        names
    )
    assert result.difference < 1e-4
    assert result.plan.band_rows == 2

    mask = read(result.written[0])[0]
    assert set(np.unique(mask)) == {0, 1}
    shares = read(result.written[1])
    assert shares.shape == (3, 70, 90)
    assert np.allclose(shares.sum(0), 1, atol=5e-3)
    chosen = np.take_along_axis(shares, mask[None].astype(int), 0)[0]
    # Of classes that float16 cannot tell apart either may be the one.
    assert (chosen >= shares.max(0) - 2.0**-11).all()
    importance = read(result.written[2])[0]
    assert importance.shape == (9, 12)
    assert importance.mean() == pytest.approx(1, abs=1e-3)
    with rasterio.open(result.written[0]) as dataset:
        assert dataset.colormap(1)[1] == (255, 255, 0, 255)
        assert json.loads(dataset.tags()['CLASS_NAMES'])[1] == 'bright'
        assert dataset.nodata == 255
    with Image.open(result.written[3]) as overview:
        assert overview.height >= 70 and overview.width > 90


def test_every_setting_gives_the_same_mask(model, tmp_path):
    image = picture(150, 61)
    np.save(tmp_path / 'a.npy', image)
    masks = []
    for index, options in enumerate(
        (
            dict(),
            dict(band_rows=1),
            dict(band_rows=7, store='disk'),
            dict(store='disk', scratch=tmp_path / 'scratch'),
        )
    ):
        out = tmp_path / f'{index}.tif'
        infer_large_image(model, tmp_path / 'a.npy', out, **options)
        masks.append(read(out))
    assert all(np.array_equal(masks[0], mask) for mask in masks[1:])
    assert len(np.unique(masks[0])) == 2
    assert not list((tmp_path / 'scratch').iterdir())
    assert not list(tmp_path.glob('.*'))


def test_the_whole_forward_of_our_segmentor(model, tmp_path):
    """Pixel for pixel but for ties, with a segmentor that pads."""
    from tests.execution.networks import forward

    image = picture(75, 83)
    np.save(tmp_path / 'a.npy', image)
    out = tmp_path / 'a.tif'
    infer_large_image(model, tmp_path / 'a.npy', out, band_rows=3)
    pixels = (torch.from_numpy(image).permute(2, 0, 1).float() - 127.5) / 127.5
    # The config of the project does not swap channels: the model sees BGR.
    logits = forward(model, pixels.flip(0)[None])
    top = logits.topk(2, 0).values
    clear = (top[0] - top[1] > 1e-3).numpy()
    assert clear.mean() > 0.99
    assert (read(out)[0] == logits.argmax(0).numpy())[clear].all()


@pytest.mark.parametrize('kind', ['alpha', 'nodata', 'nan'])
def test_a_collar_changes_nothing_inside(model, tmp_path, kind):
    """Half or nine tenths of the raster not valid: the same classes inside.

    The collar has any width, so that its patches are others.
    """
    image = picture(61, 53)
    np.save(tmp_path / 'bare.npy', image)
    infer_large_image(model, tmp_path / 'bare.npy', tmp_path / 'bare.tif')
    bare = read(tmp_path / 'bare.tif')[0]
    for before, after in ((13, 11), (90, 60)):
        shape = (61 + before + after, 53 + before + after)
        inside = (slice(before, before + 61), slice(before, before + 53))
        path = tmp_path / f'{before}.tif'
        if kind == 'alpha':
            pixels = np.full((*shape, 4), 77, np.uint8)
            pixels[..., 3] = 0
            pixels[inside] = np.dstack([image, np.full((61, 53), 255)])
            path = path.with_suffix('.png')
            cv2.imwrite(str(path), pixels[..., [2, 1, 0, 3]])
        else:
            value = np.nan if kind == 'nan' else -1
            pixels = np.full((*shape, 3), value, np.float32)
            pixels[inside] = image
            path = path.with_suffix('.npy')
            np.save(path, pixels)
        out = tmp_path / f'{before}_mask.tif'
        with open_raster(path, None if kind != 'nodata' else -1) as reader:
            infer_large_image(
                model, reader, out, band_rows=2, probs='uint8', overview=True
            )
        mask = read(out)[0]
        assert np.array_equal(mask[inside], bare)
        mask[inside] = 255
        assert (mask == 255).all()
        probs = read(tmp_path / f'{before}_mask_probs.tif')
        assert not probs[:, mask == 255][:, 0].any()


def test_nothing_valid(model, tmp_path):
    np.save(tmp_path / 'a.npy', np.full((40, 50, 3), np.nan, np.float32))
    result = infer_large_image(
        model, tmp_path / 'a.npy', tmp_path, centrality=True
    )
    assert (read(result.written[0]) == 255).all()
    assert np.isnan(read(result.written[1])).all()
    assert result.plan is None
    assert 'none of them valid' in plan_large_image(
        model, tmp_path / 'a.npy', tmp_path
    )


def test_grey_and_deep_pictures(model, tmp_path):
    """One channel stands for all three; sixteen bits are not cut to eight."""
    grey = picture(40, 40)[..., 0]
    np.save(tmp_path / 'grey.npy', grey)
    np.save(tmp_path / 'rgb.npy', np.repeat(grey[..., None], 3, 2))
    np.save(tmp_path / 'deep.npy', grey.astype(np.uint16) * 1)
    for name in ('grey', 'rgb', 'deep'):
        infer_large_image(model, tmp_path / f'{name}.npy', tmp_path)
    masks = [read(tmp_path / f'{n}_mask.tif') for n in ('grey', 'rgb', 'deep')]
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[0], masks[2])
    np.save(tmp_path / 'five.npy', np.zeros((40, 40, 5), np.uint8))
    with pytest.raises(ValueError, match='5 channels, but the model takes 3'):
        infer_large_image(model, tmp_path / 'five.npy', tmp_path)


def test_half_precision_leaves_the_model_alone(model, tmp_path):
    np.save(tmp_path / 'a.npy', picture())
    infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'a.tif')
    for index, options in enumerate(
        (
            dict(dtype='bf16'),
            dict(store_dtype='bf16'),
            dict(store_dtype='fp16'),
        )
    ):
        out = tmp_path / f'{index}.tif'
        infer_large_image(model, tmp_path / 'a.npy', out, **options)
        assert (read(out) == read(tmp_path / 'a.tif')).mean() > 0.99
    assert next(model.parameters()).dtype == torch.float32
    # Pixels are normalised by numbers that are not rounded.
    small = _cast(model, torch.bfloat16)
    assert next(small.parameters()).dtype == torch.bfloat16
    assert small.data_preprocessor.mean.dtype == torch.float32


def test_measured_against_labels(project, trained, tmp_path):
    config, checkpoint = project / 'tiny.py', str(trained / 'iter_30.pth')
    for image in (project / 'data' / 'image').iterdir():
        shutil.copy(image, tmp_path)
    result = infer_large(
        config,
        checkpoint,
        [str(tmp_path)],
        tmp_path / 'out',
        labels=project / 'data' / 'label',
        say=lambda line: None,
    )
    assert len(result.results) == 4 and not result.failures
    assert result.metrics['mIoU'] > 50
    masks = [read(tmp_path / 'out' / f'{i}_mask.tif')[0] for i in range(4)]
    labels = [
        cv2.imread(str(project / 'data' / 'label' / f'{i}.png'), 0)
        for i in range(4)
    ]
    right = np.mean(
        [(m == n).mean() for m, n in zip(masks, labels, strict=True)]
    )
    assert result.metrics['aAcc'] == pytest.approx(100 * right, abs=0.01)

    # Its own masks, whose indices have colours, are labels too.
    for mask in (tmp_path / 'out').iterdir():
        mask.rename(mask.with_name(mask.name.replace('_mask', '')))
    itself = infer_large(
        config,
        checkpoint,
        [str(tmp_path)],
        tmp_path / 'again',
        labels=tmp_path / 'out',
        say=lambda line: None,
    )
    assert itself.metrics['aAcc'] == 100


def test_labels_are_closed_with_the_image(model, tmp_path):
    np.save(tmp_path / 'a.npy', picture())
    (tmp_path / 'labels').mkdir()
    path = tmp_path / 'labels' / 'a.tif'
    truth = np.random.default_rng(0).integers(0, 3, (70, 90), np.uint8)
    tifffile.imwrite(path, truth)
    options = LargeOptions(labels=tmp_path / 'labels')
    with open_source(model, tmp_path / 'a.npy', options) as source:
        found = source.labels.read_labels(Window(0, 0, 70, 90))
        assert (found == truth).all()
        assert str(path) in open_files()
    assert str(path) not in open_files()


def open_files() -> list[str]:
    found = []
    for entry in Path('/proc/self/fd').iterdir():
        with suppress(OSError):  # the listing itself
            found.append(os.readlink(entry))
    return found


def test_names_of_inputs(tmp_path):
    for name in ('b.png', 'a.TIF', 'notes.txt', '.hidden.png'):
        (tmp_path / name).touch()
    found = [str(tmp_path / name) for name in ('a.TIF', 'b.png')]
    assert expand([str(tmp_path)]) == found
    assert expand([f'{tmp_path}/*.png', 'scene:64']) == [found[1], 'scene:64']
    assert expand(['missing.tif']) == ['missing.tif']
    with pytest.raises(ValueError, match='matches no file'):
        expand([f'{tmp_path}/*.jp2'])
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='has no file that ends in'):
        expand([str(tmp_path / 'empty')])


@contextmanager
def nothing_left(folder):
    before = sorted(folder.iterdir())
    yield
    assert sorted(folder.iterdir()) == before


def test_failures_leave_nothing(model, tmp_path, monkeypatch):
    np.save(tmp_path / 'a.npy', picture())
    source, out = tmp_path / 'a.npy', tmp_path / 'a.tif'

    def fail(options, kind, message):
        with nothing_left(tmp_path), pytest.raises(kind, match=message):
            infer_large_image(model, source, out, **options)

    fail(dict(max_memory='100MB'), ValueError, 'use a larger --max-memory')
    fail(dict(max_memory='plenty'), ValueError, 'is no amount of memory')
    fail(dict(store='tape'), ValueError, "store='tape' is unknown")
    fail(dict(band_rows=0), ValueError, 'band_rows=0: give 1 or more')
    fail(dict(palette=[(0, 0, 0)]), ValueError, '1 colours for 3 classes')
    fail(dict(labels=tmp_path), ValueError, 'has neither a.png nor a.tif')

    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'disk_usage', lambda _: usage._replace(free=99))
        fail(dict(store='disk'), ValueError, '99 B are free, but up to')

    with monkeypatch.context() as patch:
        head = type(model.decode_head)

        def interrupt(*_):
            raise KeyboardInterrupt

        patch.setattr(head, 'decode_taps', interrupt)
        # Once for the plan, which runs the network without numbers.
        fail(dict(store='disk'), KeyboardInterrupt, '')

    infer_large_image(model, source, out)
    content = out.read_bytes()
    fail({}, FileExistsError, 'exists; use --overwrite')
    assert out.read_bytes() == content
    infer_large_image(model, source, out, overwrite=True, band_rows=1)
    assert out.read_bytes() != b''


def test_tested_in_bands(project, trained, tmp_path):
    """``test_cfg.mode='stream'`` has the metrics of the whole images."""
    metrics = [
        evaluate(
            project / 'tiny.py',
            str(trained / 'iter_30.pth'),
            str(tmp_path / mode),
            cfg_options={
                'model.type': 'BandEncoderDecoder',
                'model.test_cfg.mode': mode,
                'model.test_cfg.band_rows': 1,
            },
        )
        for mode in ('whole', 'stream')
    ]
    assert metrics[0]['mIoU'] > 50
    assert metrics[0] == pytest.approx(metrics[1], abs=0.02)


def test_centrality_needs_attention(project, tmp_path):
    np.save(tmp_path / 'a.npy', picture())
    bare = init_model(
        project / 'tiny.py',
        cfg_options={'model.backbone.attn_cfg': dict(variant='none')},
    )
    with nothing_left(tmp_path), pytest.raises(ValueError, match='attention'):
        infer_large_image(
            bare, tmp_path / 'a.npy', tmp_path / 'out', centrality=True
        )


@pytest.mark.parametrize(
    'attention',
    [
        dict(variant='linear'),
        dict(variant='neumann', graph='crelu', norm='row'),
        dict(variant='neumann', hops='inf'),
    ],
)
def test_centrality_of_any_attention(project, tmp_path, attention):
    """Its average is 1, and the model is left as it was."""
    np.save(tmp_path / 'a.npy', picture())
    model = init_model(
        project / 'tiny.py',
        cfg_options={'model.backbone.attn_cfg': attention},
    )
    result = infer_large_image(
        model, tmp_path / 'a.npy', tmp_path / 'out', centrality=True
    )
    assert read(result.written[1]).mean() == pytest.approx(1, abs=1e-3)
    for module in model.modules():
        assert not getattr(module, 'with_importance', False)


def test_coordinates_channels_and_areas(model, tmp_path):
    """Of a raster of five channels, in feet, with a nodata of our own."""
    image = picture(64, 48)
    image[:16] = 9
    place = rasterio.transform.from_origin(500, 900, 3, 2)
    with rasterio.open(
        tmp_path / 'a.tif',
        *('w', 'GTiff', 48, 64, 5, 'EPSG:2263', place, 'uint8'),
    ) as dataset:
        for index, channel in ((5, 0), (2, 1), (4, 2), (1, 0), (3, 0)):
            dataset.write(image[..., channel], index)
    with pytest.raises(ValueError, match=r'5 channels, .* --channels'):
        infer_large_image(model, tmp_path / 'a.tif', tmp_path)
    with pytest.raises(ValueError, match=r'channels 1 to 5, not \[1, 6, 2\]'):
        infer_large_image(
            model, tmp_path / 'a.tif', tmp_path, channels=[1, 6, 2]
        )
    result = infer_large_image(
        model,
        tmp_path / 'a.tif',
        tmp_path,
        channels=[5, 2, 4],
        nodata=9,
        areas='csv',
        centrality=True,
    )
    np.save(tmp_path / 'b.npy', image[16:])
    infer_large_image(model, tmp_path / 'b.npy', tmp_path / 'b.tif')
    mask, bare = read(result.written[0])[0], read(tmp_path / 'b.tif')[0]
    assert (mask[:16] == 255).all()
    assert np.array_equal(mask[16:], bare)
    with rasterio.open(result.written[0]) as dataset:
        assert dataset.crs.to_epsg() == 2263
        assert dataset.transform == place
    with rasterio.open(result.written[1]) as dataset:
        assert dataset.transform == place * place.translation(
            0, 16
        ) * place.scale(8)
    with result.written[2].open() as file:
        rows = list(csv.DictReader(file))
    assert [r['class'] for r in rows] == list(model.dataset_meta['classes'])
    for index, row in enumerate(rows):
        count = (bare == index).sum()
        assert int(row['pixels']) == count
        share, metres, hectares, millimetres = (
            float(row[key])
            for key in (
                *('share', 'square_metres', 'hectares'),
                'square_millimetres',
            )
        )
        assert share == pytest.approx(count / bare.size, abs=1e-6)
        assert metres == pytest.approx(count * 6 * 0.3048006096**2)
        assert hectares == pytest.approx(metres / 1e4)
        assert millimetres == pytest.approx(metres * 1e6)


def test_little_of_a_wide_raster_is_held_beside_the_bands():
    """At most 16 MiB of pixels, or a row."""
    for width, channels, dtype in (
        (10**6, 4, 'u2'),
        (10**8, 3, 'u1'),
        (9, 1, 'u1'),
    ):
        meta = RasterMeta(700, width, channels, np.dtype(dtype))
        strips = strips_of(SimpleNamespace(meta=meta))
        row = width * channels * meta.dtype.itemsize
        assert all(s.num_rows * row <= max(2**24, row) for s in strips)
        assert strips[0].start == 0 and strips[-1].stop == 700


def test_validity_is_scanned_twice_at_most(model, tmp_path, monkeypatch):
    """Once for its extent and once for its tokens, with --verify too."""
    pixels = picture(64, 40).astype(np.float32)
    pixels[:9] = np.nan
    np.save(tmp_path / 'a.npy', pixels)
    looked_at = []

    def look(window, level=0):
        # Not the spots at which values are looked at.
        if window.width == 40:
            looked_at.append(window.height)
        return plain(window, level)

    with open_raster(tmp_path / 'a.npy') as reader:
        plain = reader.read_valid
        monkeypatch.setattr(reader, 'read_valid', look)
        result = infer_large_image(
            model, reader, tmp_path / 'out', verify=8, band_rows=3
        )
    assert result.difference < 1e-4
    # Both scans; with the pixels that are embedded, twice; with the classes.
    assert sum(looked_at) == 64 + 55 + 2 * 55 + 55
