# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One label for a large image, with the map of what it rests on."""

import json

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from mmengine.structures import BaseDataElement
from PIL import Image
from torch import nn

from infsa_seg.apis import (
    classify,
    infer,
    infer_large,
    infer_large_image,
    init_model,
)

from .conftest import REPO
from .test_products import read, scene, write_map, write_slide

rasterio = pytest.importorskip('rasterio')

CLASSES = ['tabby', 'lynx', 'goldfish']
CONFIG = """
_base_ = '{repo}/configs/pretrain/infvit-4x128_neumann_tiny-imagenet-50.py'
model = dict(
    data_preprocessor=dict(num_classes=3),
    backbone=dict(
        embed_dims=16, num_layers=2, num_heads=2, img_size=32, ffn='dwconv'
    ),
    num_classes=3,
)
"""


def write_classifier(config, weights):
    """A config, and weights that let every token matter."""
    config.write_text(CONFIG.format(repo=REPO))
    model = init_model(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    meta = dict(dataset_meta=dict(classes=CLASSES))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), weights)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('label')
    config, weights = folder / 'three.py', folder / 'three.pth'
    write_classifier(config, weights)
    return config, str(weights)


@pytest.fixture
def model(files):
    return init_model(*files)


def forward(model, pixels):
    """Scores of the plain forward pass over RGB."""
    tensor = torch.from_numpy(pixels[..., ::-1].copy()).permute(2, 0, 1)
    batch = model.data_preprocessor(dict(inputs=[tensor]))
    height, width = pixels.shape[:2]
    padded = nn.functional.pad(
        batch['inputs'], (0, -width % 8, 0, -height % 8)
    )
    sample = BaseDataElement(metainfo=dict(img_shape=(height, width)))
    with torch.no_grad():
        (sample,) = model(padded, [sample], mode='predict')
    return sample.pred_score.numpy()


def scores_of(path):
    content = json.loads(path.read_text())
    by_index = {item['index']: item for item in content['scores']}
    assert [by_index[i]['class'] for i in range(3)] == CLASSES
    return content, np.array([by_index[i]['score'] for i in range(3)])


@pytest.mark.parametrize('size', [(160, 240), (91, 67), (5, 3)])
@pytest.mark.parametrize('store', ['ram', 'disk'])
def test_the_label_of_the_whole_forward(model, tmp_path, size, store):
    """Scores within 1e-5; centrality is 1 on average."""
    pixels = scene()[: size[0], : size[1]]
    np.save(tmp_path / 'a.npy', pixels)
    result = infer_large_image(
        *(model, tmp_path / 'a.npy', tmp_path / 'out'),
        store=store,
        band_rows=3,
        verify=1,
    )
    names = ['a_label.json', 'a_centrality.tif']
    assert [path.name for path in result.written] == names
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == (
        sorted(names)
    )
    content, scores = scores_of(result.written[0])
    expected = forward(model, pixels)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert content['index'] == expected.argmax()
    assert content['label'] == CLASSES[expected.argmax()]
    assert content['score'] == scores.max()
    assert result.summary['scores'][0]['class'] == content['label']
    assert result.difference < 1e-5
    centrality = read(result.written[1])
    assert centrality.shape == tuple(-(-side // 8) for side in size)
    assert centrality.mean() == pytest.approx(1, abs=1e-5)


def test_a_map_and_its_picture(model, tmp_path):
    write_map(tmp_path / 'a.tif', scene())
    result = infer_large_image(
        *(model, tmp_path / 'a.tif', tmp_path / 'b.json'),
        overview=True,
        manifest=True,
    )
    paths = {path.name: path for path in result.written}
    with rasterio.open(paths['b_centrality.tif']) as centrality:
        assert centrality.transform[:3] == (4, 0, 4e5)
        assert centrality.crs.to_epsg() == 32632
        heat = centrality.read(1)
    manifest = json.loads(paths['b_manifest.json'].read_text())
    assert manifest['summary']['scores'] == result.summary['scores']
    assert manifest['files']['label'] == 'b.json'
    picture = np.array(Image.open(paths['b_overview.png']))
    assert picture.shape[0] >= 160 and picture.shape[1] > 240
    # Half of it is the picture, half the colour, up to the 99th percentile.
    for place in (heat.argmax(), heat.argmin()):
        level = heat.flat[place] / np.percentile(heat, 99)
        colour = 255 * np.array(colormaps['viridis'](min(level, 1.0))[:3])
        row, column = 8 * np.array(np.unravel_index(place, heat.shape))
        token = np.s_[row : row + 8, column : column + 8]
        expected = 0.5 * scene()[token] + 0.5 * colour
        np.testing.assert_allclose(picture[token], expected, rtol=0, atol=3)


def test_tissue_of_a_slide(model, tmp_path):
    """Glass has no say, and no centrality."""
    glass = np.full((320, 480, 3), 240, np.uint8)
    mask = np.zeros((320, 480), np.uint8)
    mask[80:208, 64:256] = 255
    Image.fromarray(mask).save(tmp_path / 'mask.png')
    glass[mask > 0] = scene(320, 480)[mask > 0]
    write_slide(tmp_path / 'a.tif', glass)
    result = infer_large_image(
        *(model, tmp_path / 'a.tif', tmp_path / 'out'),
        tissue=tmp_path / 'mask.png',
        res='0.5um',
        overview=True,
    )
    _, scores = scores_of(result.written[0])
    expected = forward(model, glass[80:208, 64:256])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    heat = read(result.written[1])
    assert heat.shape == (16, 24) and np.isfinite(heat).all()
    picture = np.array(Image.open(tmp_path / 'out' / 'a_overview.png'))
    outside = picture[:320, :480][mask == 0]
    assert (outside == 240).all()


def test_a_hole_has_no_say(model, tmp_path):
    pixels = scene(160, 240).astype(np.int16)
    pixels[64:96, 80:120] = -1
    np.save(tmp_path / 'a.npy', pixels)
    other = pixels.copy()
    other[64:96, 80:120] = 30000
    np.save(tmp_path / 'b.npy', other)
    found = []
    for name, nodata in (('a', -1), ('b', 30000)):
        result = infer_large_image(
            *(model, tmp_path / f'{name}.npy', tmp_path / 'out'),
            nodata=nodata,
        )
        found.append(scores_of(result.written[0])[1])
        heat = read(result.written[1])
        assert np.isnan(heat).sum() == 4 * 5
        assert np.nanmean(heat) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(*found)


def test_half_precision_leaves_the_model_alone(model, tmp_path):
    """Scores within 0.02; one label by bands in half precision too."""
    np.save(tmp_path / 'a.npy', scene())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = infer_large_image(
        model, tmp_path / 'a.npy', tmp_path / 'out', dtype='bf16'
    )
    _, scores = scores_of(result.written[0])
    np.testing.assert_allclose(
        scores, forward(model, scene()), rtol=0, atol=0.02
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype


@pytest.mark.parametrize(
    'option',
    [
        *(dict(probs='uint8'), dict(areas='csv'), dict(polygons='gpkg')),
        *(dict(style=True), dict(pyramid=False), dict(cog=True)),
        *(dict(palette=[(1, 2, 3)]), dict(labels='.'), dict(min_area=1.0)),
    ],
)
def test_options_for_pixels_are_refused(model, tmp_path, option):
    np.save(tmp_path / 'a.npy', scene())
    (name,) = option
    words = f'--{name.replace("_", "-")}: the model has one label'
    with pytest.raises(ValueError, match=words):
        infer_large_image(
            model, tmp_path / 'a.npy', tmp_path / 'out', **option
        )
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('key', 'value', 'words'),
    [
        ('pool', 'cls_token', "use pool='mean'"),
        ('backbone.attn_cfg.variant', 'softmax', 'layers.0.attn.op'),
        ('num_classes', 4, 'names 3 classes, but the model has 4'),
    ],
)
def test_models_that_cannot(files, tmp_path, key, value, words):
    np.save(tmp_path / 'a.npy', scene())
    model = init_model(files[0], cfg_options={f'model.{key}': value})
    model.dataset_meta = dict(classes=CLASSES)
    with pytest.raises(ValueError, match=words):
        infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_without_attention_there_is_a_label_alone(files, tmp_path):
    np.save(tmp_path / 'a.npy', scene())
    options = {'model.backbone.attn_cfg.variant': 'none'}
    model = init_model(files[0], cfg_options=options)
    result = infer_large_image(
        model, tmp_path / 'a.npy', tmp_path / 'out', overview=True
    )
    assert [path.name for path in result.written] == (
        ['a_label.json', 'a_overview.png']
    )
    # The picture alone: there is nothing to colour it by.
    picture = np.array(Image.open(result.written[1]))
    assert np.array_equal(picture[:160, :240], scene())
    assert set(map(tuple, picture[:, 240:].reshape(-1, 3))) == {
        (n, n, n) for n in set(picture[:, 240:, 0].ravel().tolist())
    }
    # Of no training there are no names.
    assert json.loads(result.written[0].read_text())['label'] in '012'


def test_nothing_valid_is_an_error(model, tmp_path):
    np.save(tmp_path / 'a.npy', np.zeros((40, 40, 3), np.uint8))
    with pytest.raises(ValueError, match=r'a\.npy: has no valid pixel'):
        infer_large_image(
            model, tmp_path / 'a.npy', tmp_path / 'out', nodata=0
        )
    assert not (tmp_path / 'out').exists()


def test_no_label_of_what_is_not_finite(model, tmp_path):
    model.head.bias.data[0] = torch.nan
    np.save(tmp_path / 'a.npy', scene())
    with pytest.raises(ValueError, match='not finite; use --dtype fp32'):
        infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'out')
    assert not list((tmp_path / 'out').glob('*'))


def test_several_inputs(files, tmp_path):
    for name in 'ab':
        np.save(tmp_path / f'{name}.npy', scene())
    (tmp_path / 'c.npy').write_bytes(b'nothing')
    inputs = [str(tmp_path)]
    with pytest.raises(ValueError, match='one file for 3 inputs'):
        infer_large(*files, inputs, tmp_path / 'one.json')
    found = infer_large(
        *files, inputs, tmp_path / 'out', say=lambda line: None
    )
    assert len(found.results) == 2 and found.metrics == {}
    assert list(found.failures) == [str(tmp_path / 'c.npy')]
    lines = []
    infer_large(files[0], None, inputs[:1], 'out', plan=True, say=lines.append)
    assert any('sweeps   3, each of' in line for line in lines)


def test_values_of_another_scale_are_doubted(model, tmp_path):
    np.save(tmp_path / 'a.npy', scene().astype(np.uint16) * 200)
    result = infer_large_image(model, tmp_path / 'a.npy', tmp_path / 'out')
    assert any('--stretch 2,98' in note for note in result.notes)


def test_small_pictures_are_for_segmentors(files, tmp_path):
    with pytest.raises(ValueError, match=r'use tools/infer_large\.py'):
        infer(*files, ['a.png'], tmp_path)


def test_pictures_are_classified_as_in_testing(files, tmp_path):
    """By the config's test data; 1e-5."""
    for index in range(2):
        picture = scene()[index:, : 64 + index]
        Image.fromarray(picture).save(tmp_path / f'{index}.png')
    model = init_model(*files)
    paths = sorted(tmp_path.glob('*.png'))
    samples = classify(model, paths)
    for path, sample in zip(paths, samples, strict=True):
        pixels = np.array(Image.open(path))
        expected = forward(model, pixels)
        np.testing.assert_allclose(
            sample.pred_score, expected, rtol=0, atol=1e-5
        )
        assert sample.pred_label == expected.argmax()
        assert sample.img_path == str(path)
