# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The foreseen memory of training against what PyTorch allocates."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infsa_seg.apis import estimate_memory, load_config
from infsa_seg.apis.estimate import _build, _Step

CONFIG = Path(__file__).parents[2] / 'configs' / 'infvit_seg_4k.py'
GIB = 2**30


def options(variant='neumann', ffn='dwconv', **kwargs):
    """A small network of the shape of the one in the config."""
    return {
        'model.backbone.embed_dims': 128,
        'model.backbone.num_layers': 3,
        'model.backbone.num_heads': 2,
        'model.backbone.img_size': 128,
        'model.backbone.out_indices': [0, 2],
        'model.backbone.attn_cfg': dict(variant=variant),
        'model.backbone.ffn': ffn,
        'model.decode_head.in_channels': [128, 128],
        'model.decode_head.in_index': [0, 1],
        # A small head, for the layers to show.
        'model.decode_head.channels': 8,
        # Strips small enough that there are several.
        'model.decode_head.loss_decode': dict(
            type='BandCrossEntropyLoss', max_logits=2**19
        ),
        **kwargs,
    }


def allocated(step, model):
    """The most bytes that the allocator gave out in a step of training.

    Gradients are there before, as in all steps but the first.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as found:
        inputs = [torch.zeros(x.shape, dtype=x.dtype) for x in step.inputs]
        step(model, *inputs).backward()
    events = found.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == '[memory]'
    )
    alive = torch.tensor([change for _, change in changes]).cumsum(0)
    return int(alive.max())


def build(recompute, **kwargs):
    model = _build(load_config(CONFIG, options(**kwargs)), recompute)
    model.to_empty(device='cpu')
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_() if tensor.dim() < 2 else tensor.data.normal_()
    return model


@pytest.mark.parametrize(
    ('variant', 'ffn', 'crop', 'recompute'),
    [
        ('neumann', 'mlp', (256, 192), False),
        ('neumann', 'dwconv', (200, 384), True),
        ('linear', 'mlp', (200, 384), True),
        ('linear', 'dwconv', (256, 192), False),
    ],
)
def test_activations_are_those_of_the_allocator(variant, ffn, crop, recompute):
    found = estimate_memory(
        CONFIG,
        crop=crop,
        batch_size=2,
        recompute=recompute,
        cfg_options=options(variant, ffn),
    )
    model = build(recompute, variant=variant, ffn=ffn)
    measured = allocated(_Step(model, crop, 2, 1), model)
    assert found.activations.peak == pytest.approx(measured, rel=0.15)
    assert found.activations.kept < found.activations.peak
    assert found.num_weights == sum(p.numel() for p in model.parameters())
