# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS

from tests.apis.conftest import REPO

ARCH = dict(embed_dims=16, num_layers=3, num_heads=2)


@pytest.fixture
def model():
    return MODELS.build(
        dict(
            type='InfViTClassifier',
            backbone=dict(type='InfViT', arch=ARCH, img_size=32),
            num_classes=4,
            pool='cls_token',
        )
    )


def build(model, decay_rate):
    cfg = Config.fromfile(REPO / 'configs/_base_/schedules/schedule_deit.py')
    cfg.optim_wrapper.optimizer.lr = 1.0
    cfg.optim_wrapper.paramwise_cfg.decay_rate = decay_rate
    with DefaultScope.overwrite_default_scope('mmseg'):
        wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(parameter)]: group
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }


def test_rates_fall_from_the_head_to_the_embedding(model):
    groups = build(model, 0.5)
    assert set(groups) == {name for name, _ in model.named_parameters()}
    for name, group in groups.items():
        if name.startswith('backbone.layers.'):
            expected = 0.5 ** (3 - int(name.split('.')[2]))
        elif name.startswith(('backbone.', 'cls_token')):
            expected = 0.5**4
        else:
            expected = 1.0
        assert group['lr'] == pytest.approx(expected), name


def test_decay_of_weights_is_for_matrices(model):
    for rate in (1.0, 0.5):
        for name, group in build(model, rate).items():
            shape = model.get_parameter(name).shape
            free = len(shape) == 1 or 'position' in name or 'landmark' in name
            assert group['weight_decay'] == (0 if free else 0.05), name


def test_one_is_no_decay(model):
    assert {group['lr'] for group in build(model, 1.0).values()} == {1.0}


def test_goes_with_a_segmentor():
    model = torch.nn.Module()
    model.backbone = MODELS.build(
        dict(type='InfViT', arch=ARCH, img_size=32, final_norm=True)
    )
    model.decode_head = torch.nn.Linear(2, 2)
    groups = build(model, 0.1)
    assert groups['backbone.norm.weight']['lr'] == 1
    assert groups['decode_head.weight']['lr'] == 1
    assert groups['backbone.patch_embed.projection.bias'][
        'lr'
    ] == pytest.approx(1e-4)


def test_needs_a_backbone_with_layers():
    with pytest.raises(ValueError, match='no backbone with layers'):
        build(torch.nn.Linear(2, 2), 0.5)
