# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import torch
from mmengine.logging import MessageHub
from torch import nn

from infsa_seg.engine import DeadHeadsHook
from infsa_seg.layers import InfSAAttention


def test_dead_heads_reach_the_log():
    layers = [
        InfSAAttention(12, 3, variant='linear', qkv_bias=False),
        InfSAAttention(12, 3, variant='pure', qkv_bias=False),
        InfSAAttention(12, 3, variant='neumann'),
    ]
    hub = MessageHub.get_instance('test_dead_heads')
    runner = SimpleNamespace(
        model=nn.ModuleList(layers), message_hub=hub, iter=9
    )
    hook = DeadHeadsHook(interval=10)
    hook.after_train_iter(runner, 9)
    assert 'train/dead_heads' not in hub.log_scalars

    with torch.no_grad():
        for layer in layers[:2]:
            layer.k_proj.weight.copy_(-layer.q_proj.weight)
            layer(torch.ones(2, 5, 12))
    runner.iter = 8
    hook.after_train_iter(runner, 8)
    assert 'train/dead_heads' not in hub.log_scalars
    runner.iter = 9
    hook.after_train_iter(runner, 9)
    assert hub.log_scalars['train/dead_heads'].current() == 12


def test_those_who_share_an_image_count_it_once():
    layer = InfSAAttention(12, 3, variant='linear', qkv_bias=False)
    model = nn.ModuleList([layer])
    model.spatial_parallel = SimpleNamespace(size=2)
    with torch.no_grad():
        layer.k_proj.weight.copy_(-layer.q_proj.weight)
        layer(torch.ones(4, 5, 12))
    hub = MessageHub.get_instance('test_shared_dead_heads')
    runner = SimpleNamespace(model=model, message_hub=hub, iter=0)
    DeadHeadsHook(interval=1).after_train_iter(runner, 0)
    assert hub.log_scalars['train/dead_heads'].current() == 6
