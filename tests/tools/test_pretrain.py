# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Training, measuring and exporting a classifier of two classes."""

import numpy as np
import pytest
import torch
from mmengine.config import config
from mmseg.registry import MODELS
from PIL import Image

from infsa_seg.apis import evaluate
from infsa_seg.apis.pretrain import export_backbone, pretrain
from infsa_seg.models.utils import load_pretrained
from tests.apis.conftest import REPO

CONFIG = """
_base_ = '{repo}/configs/pretrain/infvit-4x128_neumann_tiny-imagenet-50.py'
model = dict(
    data_preprocessor=dict(num_classes=2),
    backbone=dict(
        embed_dims=16, num_layers=2, num_heads=2, img_size=32, ffn='dwconv'
    ),
    num_classes=2,
)
data = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_root='{data}'),
)
train_pipeline = [
    dict(type='LoadPicture'),
    dict(type='RandomResizedCrop', scale=32, crop_ratio_range=(0.6, 1.0)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackClsInputs'),
]
train_dataloader = dict(
    **data | dict(dataset=dict(data_root='{data}', pipeline=train_pipeline)),
    batch_size=8,
)
val_dataloader = dict(**data, batch_size=5)
test_dataloader = dict(**data, batch_size=5)
optim_wrapper = dict(optimizer=dict(lr=1e-2))
param_scheduler = []
train_cfg = dict(max_epochs=8, val_interval=8)
default_hooks = dict(checkpoint=dict(interval=4))
"""
CONFIG = CONFIG.replace(
    'param_scheduler = []',
    "param_scheduler = [dict(type='ConstantLR', factor=1.0, end=99)]",
)


def stripes(upright, rng):
    """A picture of stripes, so that no single pixel tells the class."""
    wave = 60 * np.sign(np.sin(np.arange(36) + rng.uniform(0, 6)))
    picture = np.full((36, 36, 3), 128.0) + wave[:, None, None]
    if upright:
        picture = picture.swapaxes(0, 1)
    return (picture + rng.uniform(-9, 9, picture.shape)).astype(np.uint8)


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    """Eight pictures of each of two classes, to train and to test with."""
    root = tmp_path_factory.getbasetemp() / 'pretrain'
    if root.exists():  # made for the tests in the other folder
        return root
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for upright, name in enumerate(('n01', 'n02')):
            (root / 'data' / split / name).mkdir(parents=True)
            for index in range(8):
                Image.fromarray(stripes(upright, rng)).save(
                    root / 'data' / split / name / f'{name}_{index}.JPEG'
                )
    (root / 'two.py').write_text(CONFIG.format(repo=REPO, data=root / 'data'))
    return root


@pytest.fixture(scope='module', autouse=True)
def no_layout_of_configs():
    """They are laid out ten times in a run, for half of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, 'FormatCode', lambda text, **_: (text, True))
        yield


@pytest.fixture(scope='module')
def result(folder):
    return pretrain(folder / 'two.py', work_dir=str(folder / 'work'))


def test_learns_both_classes(result):
    assert result.metrics == {'accuracy/top1': 100, 'accuracy/top5': 100}


def test_measures_and_exports_the_moving_average(result):
    checkpoint = torch.load(result.checkpoint, weights_only=True)
    assert result.checkpoint.name == 'epoch_8.pth'
    exported = torch.load(result.weights, weights_only=True)['state_dict']
    name = 'layers.0.ffn.op.fc1.weight'
    mean = checkpoint['state_dict'][f'backbone.{name}']
    last = checkpoint['ema_state_dict'][f'module.backbone.{name}']
    torch.testing.assert_close(exported[name], mean, rtol=0, atol=0)
    assert not torch.equal(mean, last)


def test_meta_tells_how_to_use_it(result):
    content = torch.load(result.weights, weights_only=True)
    meta = content['meta']
    assert set(content) == {'state_dict', 'meta'}
    assert meta['grid'] == [4, 4]
    assert meta['patch_size'] == 8
    assert meta['mean'] == [123.675, 116.28, 103.53]
    assert meta['std'] == [58.395, 57.12, 57.375]
    assert meta['bgr_to_rgb'] is True
    assert meta['classes'] == ['n01', 'n02']
    assert meta['metrics'] == result.metrics
    backbone = MODELS.build(meta['backbone'])
    backbone.load_state_dict(content['state_dict'])
    # What tells the classes apart is in the backbone.
    assert not any('head' in name for name in content['state_dict'])


def test_a_segmentor_begins_with_it(result):
    """At another grid, with nothing missing and nothing left over."""
    weights = str(result.weights)
    segmentor = MODELS.build(
        dict(
            type='BandEncoderDecoder',
            backbone=dict(
                type='InfViT',
                arch=dict(embed_dims=16, num_layers=2, num_heads=2),
                img_size=(72, 48),
                patch_size=8,
                ffn='dwconv',
                out_indices=(0, 1),
                init_cfg=dict(type='Pretrained', checkpoint=weights),
            ),
            decode_head=dict(
                type='BandSegHead',
                in_channels=[16, 16],
                in_index=[0, 1],
                channels=8,
                num_classes=3,
            ),
            test_cfg=dict(mode='whole'),
        )
    )
    segmentor.init_weights()
    state = torch.load(weights, weights_only=True)['state_dict']
    mine = segmentor.backbone.state_dict()
    assert mine.keys() == state.keys()
    for name, value in state.items():
        if name != 'position.weight':
            torch.testing.assert_close(mine[name], value, rtol=0, atol=0)
    assert mine['position.weight'].shape == (9, 6, 16)
    assert load_pretrained(segmentor.backbone, weights).complete


def test_the_tools(tool, folder, result, tmp_path):
    out = tmp_path / 'deep' / 'mine.pth'
    args = (
        folder / 'two.py',
        '--work-dir',
        tmp_path / 'work',
        '--out',
        out,
        '--cfg-options',
        'train_cfg.max_epochs=1',
        'train_cfg.val_interval=1',
    )
    outcome = tool('pretrain.py', *args)
    assert outcome.status == 0, outcome.err
    assert outcome.out.endswith(f'{out}\n')
    assert 'accuracy/top1: ' in outcome.out
    first = torch.load(out, weights_only=True)['state_dict']

    # From there on to the end.
    outcome = tool(
        'pretrain.py',
        *args[:-2],
        'train_cfg.max_epochs=2',
        'train_cfg.val_interval=1',
        '--resume',
    )
    assert outcome.status == 0, outcome.err
    assert 'resumed epoch: 1' in outcome.out
    second = torch.load(out, weights_only=True)['state_dict']
    name = 'layers.0.ffn.op.fc1.weight'
    assert not torch.equal(first[name], second[name])

    tested = tool(
        'test.py',
        folder / 'two.py',
        result.checkpoint,
        '--work-dir',
        tmp_path / 'test',
    )
    assert tested.status == 0, tested.err
    assert 'accuracy/top1: 100.0' in tested.out


def test_imagenet_v2_is_tested_by_its_folder(folder, result, tmp_path):
    """Folders named by index, and no list of classes beside them."""
    rng = np.random.default_rng(1)
    for index in range(2):
        (tmp_path / f'v2/{index}').mkdir(parents=True)
        # The wrong pictures, but for one.
        for number, upright in enumerate((1 - index, 1 - index, index)):
            Image.fromarray(stripes(upright, rng)).save(
                tmp_path / f'v2/{index}/{number}.jpeg'
            )
    metrics = evaluate(
        folder / 'two.py',
        str(result.checkpoint),
        work_dir=str(tmp_path / 'work'),
        cfg_options={
            'test_dataloader.dataset.data_root': str(tmp_path / 'v2'),
            'test_dataloader.dataset.data_prefix.img_path': '',
        },
    )
    assert metrics['accuracy/top1'] == pytest.approx(100 / 3)


class TestMistakes:
    def fails(self, tool, message, *args):
        outcome = tool('pretrain.py', *args)
        assert outcome.status == 1
        last = outcome.err.strip().splitlines()[-1]
        assert last.startswith('pretrain.py: error: ')
        assert message in last

    def test_no_classifier(self, tool, tmp_path):
        self.fails(
            tool,
            'trains a BandEncoderDecoder, not an InfViTClassifier',
            REPO / 'configs/infvit_seg_demo.py',
            '--work-dir',
            tmp_path,
        )

    def test_out_is_a_folder(self, tool, folder, tmp_path):
        self.fails(
            tool, 'a folder; name', folder / 'two.py', '--out', tmp_path
        )

    def test_moving_average_under_zero(self, tool, folder, tmp_path):
        self.fails(
            tool,
            "custom_hooks='[]'",
            folder / 'two.py',
            '--work-dir',
            tmp_path,
            '--zero-stage',
            '2',
        )

    def test_no_data(self, tool, folder, tmp_path):
        self.fails(
            tool,
            f'{tmp_path}/none/train: no such folder',
            folder / 'two.py',
            '--work-dir',
            tmp_path,
            '--cfg-options',
            f'train_dataloader.dataset.data_root={tmp_path}/none',
        )

    def test_a_broken_picture(self, tool, folder, tmp_path):
        (tmp_path / 'data/train/n01').mkdir(parents=True)
        path = tmp_path / 'data/train/n01/a.JPEG'
        path.write_text('text')
        self.fails(
            tool,
            f'{path}: is no picture',
            folder / 'two.py',
            '--work-dir',
            tmp_path,
            '--cfg-options',
            f'train_dataloader.dataset.data_root={tmp_path}/data',
            'train_dataloader.batch_size=1',
        )

    def test_too_few_classes(self, tool, folder, tmp_path):
        self.fails(
            tool,
            'but the model has 1 classes; set num_classes',
            folder / 'two.py',
            '--work-dir',
            tmp_path,
            '--cfg-options',
            'model.num_classes=1',
        )

    def test_export_of_another_model(self, folder, result, tmp_path):
        other = tmp_path / 'other.py'
        other.write_text(
            f"_base_ = '{folder / 'two.py'}'\n"
            "model = dict(backbone=dict(ffn='mlp'))\n"
        )
        with pytest.raises(ValueError, match='is not of this model'):
            export_backbone(other, result.checkpoint, tmp_path / 'a.pth')
        other.write_text(
            f"_base_ = '{folder / 'two.py'}'\n"
            'model = dict(backbone=dict(embed_dims=32))\n'
        )
        with pytest.raises(ValueError, match='size mismatch'):
            export_backbone(other, result.checkpoint, tmp_path / 'a.pth')
        assert not (tmp_path / 'a.pth').exists()
