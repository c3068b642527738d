# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmseg.registry import MODELS

from tests.apis.conftest import REPO

SCHEDULES = REPO / 'configs' / '_base_' / 'schedules'


@pytest.fixture(scope='module')
def backbone():
    return MODELS.build(
        {
            'type': 'InfViT',
            'arch': {'embed_dims': 16, 'num_layers': 1, 'num_heads': 2},
            'img_size': 32,
            'attn_cfg': {'variant': 'neumann', 'hops': 2},
        }
    )


def test_weight_decay_is_for_matrices(backbone):
    cfg = Config.fromfile(SCHEDULES / 'schedule_demo.py')
    optimizer = build_optim_wrapper(backbone, cfg.optim_wrapper).optimizer
    decay = {
        id(group['params'][0]): group['weight_decay']
        for group in optimizer.param_groups
    }
    free = {
        name
        for name, parameter in backbone.named_parameters()
        if decay[id(parameter)] == 0
    }
    for name, parameter in backbone.named_parameters():
        special = 'position' in name or 'landmarks' in name
        assert (name in free) == (special or parameter.ndim == 1), name
    for part in ('landmarks', 'position', 'log_temperature', 'discount_logit'):
        assert any(part in name for name in free), part


@pytest.mark.parametrize('name', ['demo', 'camvid', '4k'])
def test_rate_warms_up_then_falls_to_zero(name):
    cfg = Config.fromfile(SCHEDULES / f'schedule_{name}.py')
    warm_up, decay = cfg.param_scheduler
    assert warm_up.end == decay.begin < cfg.train_cfg.max_iters == decay.end
    assert cfg.train_cfg.max_iters % cfg.train_cfg.val_interval == 0
    assert not (warm_up.by_epoch or decay.by_epoch)
