# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Every config of ours builds from anywhere, trains and says what it says."""

import re
from pathlib import Path

import pytest
import torch
from mmengine import Config
from mmengine.registry import DefaultScope, init_default_scope
from mmseg.registry import DATASETS, MODELS
from PIL import Image

import infsa_seg
from infsa_seg.apis import load_config, train
from infsa_seg.engine import zero_checkpoint

ROOT = Path(__file__).parents[1]
README = ROOT / 'README.md'
CONFIGS = sorted(
    str(path.relative_to(ROOT / 'configs'))
    for path in (ROOT / 'configs').rglob('*.py')
    if not {'_base_', 'pretrain'} & {*path.parts}
)
HAS_MIM = Path(infsa_seg.__file__).parent.joinpath('.mim', 'configs').is_dir()


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


def test_the_promised_configs_are_there():
    assert set(CONFIGS) >= {
        'infvit_seg_demo.py',
        'infvit_seg_demo_linear.py',
        'infvit_seg_4k.py',
        'infvit_seg_4k_linear.py',
        *(
            f'infvit/infvit-tiny_{variant}_camvid-480x360.py'
            for variant in ('neumann', 'linear', 'softmax', 'none')
        ),
    }


@pytest.mark.parametrize('name', CONFIGS)
def test_builds_from_any_directory(name, tmp_path, monkeypatch):
    """By path and by package name, the same model."""
    monkeypatch.chdir(tmp_path)
    cfg = load_config(ROOT / 'configs' / name)
    assert cfg.custom_imports['imports'] == ['infsa_seg']
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    classes = model.decode_head.num_classes
    assert len(dataset_classes(cfg.train_dataloader.dataset)) == classes
    if not HAS_MIM:
        pytest.skip('infsa_seg:: needs the package to be installed')
    assert load_config(f'infsa_seg::{name}').model == cfg.model


def dataset_classes(cfg):
    if cfg.type == 'SyntheticScenes':
        return DATASETS.build(cfg).metainfo['classes']
    return DATASETS.get(cfg.type).METAINFO['classes']


@pytest.mark.parametrize('name', ['infvit_seg_demo', 'infvit_seg_4k'])
def test_linear_sibling_differs_in_the_operator_only(name):
    mine = load_config(ROOT / 'configs' / f'{name}.py')
    sibling = load_config(ROOT / 'configs' / f'{name}_linear.py')
    assert mine.model.backbone.attn_cfg.variant == 'neumann'
    assert sibling.model.backbone.attn_cfg.variant == 'linear'
    sibling.model.backbone.attn_cfg.variant = 'neumann'
    assert sibling.to_dict() == mine.to_dict()


@pytest.mark.parametrize(
    ('name', 'size'),
    [
        ('infvit_seg_demo.py', 128),
        ('infvit_seg_demo_linear.py', 128),
        ('infvit_seg_demo_legend.py', 128),
        # A reduced crop: the network takes any size.
        ('infvit_seg_4k.py', 256),
        ('infvit_seg_4k_linear.py', 256),
    ],
)
def test_one_training_step(name, size):
    """Data as the config has it, through loss and gradient."""
    cfg = load_config(
        ROOT / 'configs' / name,
        {
            'train_dataloader.dataset.size': (size, size),
            'model.data_preprocessor.size': (size, size),
        },
    )
    init_default_scope('mmseg')
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    model = MODELS.build(cfg.model).train()
    batch = [dataset[0], dataset[1]]
    data = {key: [item[key] for item in batch] for key in batch[0]}
    data = model.data_preprocessor(data, training=True)
    assert data['inputs'].shape == (2, 3, size, size)
    losses = model(**data, mode='loss')
    losses['decode.loss_ce'].backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


def test_4k_without_deepspeed(tmp_path, monkeypatch):
    """It is named as missing, with the way to do without."""
    monkeypatch.setattr(zero_checkpoint, 'find_spec', lambda name: None)
    small = {'size': (64, 64), 'patch': 4, 'num_scenes': 2}
    options = {
        'model.data_preprocessor.size': small['size'],
        'train_dataloader.dataset': small,
        'train_dataloader.num_workers': 0,
        'train_dataloader.persistent_workers': False,
        'val_dataloader': None,
        'val_evaluator': None,
        'val_cfg': None,
        'train_cfg.max_iters': 1,
    }
    path = ROOT / 'configs' / 'infvit_seg_4k.py'
    with pytest.raises(ImportError, match=r'DeepSpeed.*strategy=None'):
        train(path, work_dir=str(tmp_path), cfg_options=options)
    options['strategy'] = None
    train(path, work_dir=str(tmp_path), cfg_options=options)
    assert (tmp_path / 'iter_1.pth').is_file()


def test_the_config_of_the_readme(tmp_path, monkeypatch):
    """Own classes and folders on top of a config of ours, word for word."""
    (block,) = re.findall(
        r'```python\n(_base_ = .*?)```', README.read_text(), re.DOTALL
    )
    base = str(ROOT / 'configs' / 'infvit_seg_4k.py')
    path = tmp_path / 'mine.py'
    path.write_text(block.replace('infsa_seg::infvit_seg_4k.py', base))
    for split in ('train', 'val'):
        for folder, suffix in (('img', '.jpg'), ('ann', '.png')):
            name = tmp_path / 'data/mine' / folder / split / f'a{suffix}'
            name.parent.mkdir(parents=True)
            Image.new('RGB' if folder == 'img' else 'L', (40, 32)).save(name)
    monkeypatch.chdir(tmp_path)
    cfg = Config.fromfile(path)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert model.decode_head.conv_seg.out_channels == 3
    assert model.backbone.embed_dims == 384
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        item = DATASETS.build(loader.dataset)[0]
        assert item['inputs'].shape == (3, 32, 40)
        assert item['data_samples'].gt_sem_seg.data.unique().tolist() == [0]
