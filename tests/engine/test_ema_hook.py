# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Without DeepSpeed; with it in test_zero_hooks.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmseg.registry import HOOKS

from infsa_seg.engine import EMAHook

from .toy import Toy, build_runner

PAIRS = [(1.0 + i / 8, 2.0) for i in range(6)]


@HOOKS.register_module()
class Weights(Hook):
    """Notes the weights after each iteration."""

    found: list

    def before_train(self, runner):
        Weights.found = []

    def after_train_iter(self, runner, batch_idx, data_batch, outputs):
        self.found.append(runner.model.weight.detach().clone().numpy())


def train(work_dir, pairs, **kwargs):
    runner = build_runner(
        work_dir,
        pairs,
        default_hooks={
            'checkpoint': {'type': 'SafeCheckpointHook', 'by_epoch': False}
        },
        custom_hooks=[
            {'type': 'EMAHook', 'momentum': 0.1},
            {'type': 'Weights'},
        ],
        **kwargs,
    )
    runner.train()
    return Weights.found


def test_it_is_ours_and_does_what_the_base_does(tmp_path):
    weights = train(tmp_path, PAIRS)
    average = weights[0]
    for weight in weights[1:]:
        average = 0.9 * average + 0.1 * weight
    content = torch.load(tmp_path / 'iter_6.pth', weights_only=True)
    assert np.allclose(content['state_dict']['weight'], average, atol=1e-6)
    kept = content['ema_state_dict']
    assert np.array_equal(kept['module.weight'], weights[-1])
    assert 'ema_state_dict' not in content['message_hub']['runtime_info']
    assert type(HOOKS.build({'type': 'EMAHook'})) is EMAHook


def test_divided_weights_are_refused():
    model = Toy()
    model.weight.ds_id = 0
    runner = SimpleNamespace(model=model)
    with pytest.raises(ValueError, match='EMAHook: ZeRO stage 3 divides'):
        EMAHook().before_run(runner)
