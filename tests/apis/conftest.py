# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infsa_seg.apis import train

REPO = Path(__file__).parents[2]
CONFIG = """
_base_ = [
    '{repo}/configs/_base_/default_runtime.py',
    '{repo}/configs/_base_/schedules/schedule_demo.py',
]
classes = ('dark', 'bright', 'unseen')
palette = [[0, 0, 128], [255, 255, 0], [255, 0, 0]]
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[127.5] * 3,
        std=[127.5] * 3,
        size=(32, 48),
        seg_pad_val=255,
    ),
    backbone=dict(
        type='InfViT',
        arch=dict(embed_dims=16, num_layers=2, num_heads=2),
        img_size=(32, 48),
        patch_size=8,
        out_indices=(0, 1),
    ),
    decode_head=dict(
        type='BandSegHead',
        in_channels=[16, 16],
        in_index=[0, 1],
        channels=8,
        num_classes=3,
        num_upsamples=1,
    ),
    test_cfg=dict(mode='whole'),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type='InfiniteSampler'),
    dataset=dict(
        type='BaseSegDataset',
        data_root='{data}',
        data_prefix=dict(img_path='image', seg_map_path='label'),
        img_suffix='.png',
        metainfo=dict(classes=classes, palette=palette),
        pipeline=test_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=train_dataloader['dataset'],
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric')
test_evaluator = val_evaluator
train_cfg = dict(max_iters=30, val_interval=30)
default_hooks = dict(
    logger=dict(interval=5), checkpoint=dict(interval=30, save_best=None)
)
randomness = dict(seed=0)
"""


@pytest.fixture(scope='session')
def project(tmp_path_factory):
    """A user's directory: pictures of bright squares, labels, a config."""
    root = tmp_path_factory.getbasetemp() / 'project'
    if root.exists():  # made for the tests in the other folder
        return root
    rng = np.random.default_rng(0)
    for kind in ('image', 'label'):
        (root / 'data' / kind).mkdir(parents=True)
    for index in range(4):
        label = np.zeros((32, 48), np.uint8)
        label[8 * (index % 3) :, 16:] = 1
        image = 60 + 120 * label[..., None] + rng.integers(0, 40, (32, 48, 3))
        name = f'{index}.png'
        Image.fromarray(label).save(root / 'data' / 'label' / name)
        Image.fromarray(image.astype(np.uint8)).save(
            root / 'data' / 'image' / name
        )
    (root / 'tiny.py').write_text(CONFIG.format(repo=REPO, data=root / 'data'))
    return root


@pytest.fixture(scope='session')
def trained(project):
    """The work directory of a training of that project, 30 iterations."""
    work_dir = project / 'trained'
    if not work_dir.exists():
        train(project / 'tiny.py', work_dir=str(work_dir))
    return work_dir
