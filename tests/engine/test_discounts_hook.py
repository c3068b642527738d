# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MessageHub
from torch import nn

from infsa_seg.engine import DiscountsHook
from infsa_seg.layers import InfSAAttention


def test_mean_least_and_most_of_each_layer_that_has_some():
    layers = [
        InfSAAttention(12, 3, variant='linear', discount=0.5),
        InfSAAttention(12, 3, variant='neumann', hops=1),
        InfSAAttention(12, 3, variant='softmax'),
        InfSAAttention(12, 3, variant='pure'),
    ]
    values = torch.tensor([0.25, 0.5, 0.9])
    with torch.no_grad():
        layers[3].discount_logit.copy_(values.logit())
    hub = MessageHub.get_instance('test_discounts')
    lines = []
    runner = SimpleNamespace(
        model=nn.ModuleList(layers),
        message_hub=hub,
        logger=SimpleNamespace(info=lines.append),
        hooks=[],
    )
    hook = DiscountsHook(interval=2)
    hook.before_train(runner)
    hook.after_train_iter(runner, 0)
    assert not hub.log_scalars
    hook.after_train_iter(runner, 1)
    found = {key: value.current() for key, value in hub.log_scalars.items()}
    expected = {
        'train/gamma/00_mean': 0.5,
        'train/gamma/00_min': 0.5,
        'train/gamma/00_max': 0.5,
        'train/gamma/03_mean': 0.55,
        'train/gamma/03_min': 0.25,
        'train/gamma/03_max': 0.9,
    }
    assert found == pytest.approx(expected)
    assert lines == [
        'gamma by layer, mean (heads): 0: 0.500 (0.500 to 0.500), '
        '3: 0.550 (0.250 to 0.900)'
    ]


def test_a_model_without_any_is_left_alone():
    lines = []
    hub = MessageHub.get_instance('test_no_discounts')
    runner = SimpleNamespace(
        model=nn.Linear(2, 2),
        message_hub=hub,
        logger=SimpleNamespace(info=lines.append),
    )
    DiscountsHook(interval=1).after_train_iter(runner, 0)
    assert not lines
    assert not hub.log_scalars
