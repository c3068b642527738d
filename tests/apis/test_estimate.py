# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The foreseen memory of training against what PyTorch allocates."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infsa_seg.apis import describe_estimate, estimate_memory, load_config
from infsa_seg.apis.estimate import _build, _Step
from infsa_seg.execution import communication, format_bytes, zero_shares
from infsa_seg.execution.training_plan import normalise_in_float
from infsa_seg.models.utils import SegmentorNetwork
from tests.execution.spatial_ranks import run_ranks

CONFIG = Path(__file__).parents[2] / 'configs' / 'infvit_seg_4k.py'


def options(variant='neumann', ffn='dwconv', **kwargs):
    """A small network of the shape of the one in the config."""
    return {
        'model.backbone.embed_dims': 96,
        'model.backbone.num_layers': 2,
        'model.backbone.num_heads': 2,
        'model.backbone.img_size': 128,
        'model.backbone.out_indices': [0, 1],
        'model.backbone.attn_cfg': dict(variant=variant),
        'model.backbone.ffn': ffn,
        'model.decode_head.in_channels': [96, 96],
        'model.decode_head.in_index': [0, 1],
        # A small head, for the layers to show.
        'model.decode_head.channels': 8,
        # Strips small enough that there are several.
        'model.decode_head.loss_decode': dict(
            type='BandCrossEntropyLoss', max_logits=2**19
        ),
        # Float32, and every rank for itself.
        'strategy': None,
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
        ('neumann', 'dwconv', (136, 256), True),
        ('linear', 'mlp', (136, 256), True),
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


def allocated_by_rank(parallel, recompute):
    """As :func:`allocated`, on a rank of two."""
    model = build(recompute)
    step = _Step(model, (256, 192), 2, parallel.size)
    step.parallel = parallel
    return allocated(step, model)


@pytest.mark.slow
def test_a_rank_of_two_takes_what_is_foreseen(tmp_path):
    measured = run_ranks(
        {str(r): (allocated_by_rank, (r,)) for r in (False, True)},
        2,
        tmp_path,
    )
    alone = estimate_memory(
        CONFIG, crop=(256, 192), batch_size=2, cfg_options=options()
    )
    for recompute in (False, True):
        found = estimate_memory(
            CONFIG,
            *(2, 2, (256, 192)),
            batch_size=2,
            recompute=recompute,
            cfg_options=options(),
        )
        for peak in measured[str(recompute)]:
            assert found.activations.peak == pytest.approx(peak, rel=0.15)
    # Recomputed, as in the config.
    half = alone.activations.peak / 2
    assert found.activations.peak == pytest.approx(half, rel=0.25)


def test_the_strategy_of_a_config_is_used():
    strategy = dict(
        stage=2,
        bf16=dict(enabled=True),
        zero_optimization=dict(reduce_bucket_size=1000),
    )
    cfg = load_config(CONFIG, options(strategy=strategy))
    found = estimate_memory(cfg, 4, crop=(64, 64))
    assert (found.zero_stage, found.precision) == (2, 'bf16')
    assert found.shares == zero_shares(
        found.num_weights, 0, 4, 2, True, bucket=1000
    )
    assert found.batch_size == cfg.train_dataloader.batch_size
    assert found.recompute
    other = estimate_memory(
        cfg, 4, crop=(64, 64), zero_stage=0, precision='fp32'
    )
    assert other.shares == zero_shares(found.num_weights, 0, 4, 0)
    assert other.activations.peak > found.activations.peak


def test_frozen_weights_have_no_gradient():
    cfg_options = options(**{'model.backbone.frozen_stages': 2})
    found = estimate_memory(CONFIG, crop=(64, 64), cfg_options=cfg_options)
    model = build(True, **{'model.backbone.frozen_stages': 2})
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < found.num_weights
    assert found.shares.gradients == 4 * trained
    assert found.shares.weights == 4 * found.num_weights


def test_other_heads_are_counted_with_their_full_logits():
    loss = dict(type='CrossEntropyLoss', avg_non_ignore=True)
    key = 'model.decode_head.loss_decode'
    found, strips = (
        estimate_memory(
            CONFIG, crop=(512, 512), batch_size=1, cfg_options=cfg_options
        )
        for cfg_options in (options(**{key: loss}), options())
    )
    # Logits of all pixels, of eight classes.
    assert found.activations.peak > strips.activations.peak + 8 * 512**2 * 4


def test_a_table_says_what_fits_and_what_would():
    asked = dict(
        config=CONFIG,
        world_size=4,
        crop=(512, 256),
        batch_size=1,
        cfg_options=options(),
    )
    found = estimate_memory(**asked)
    small = found.peak_bytes - found.activations.peak // 3
    text = '\n'.join(describe_estimate(found, ['40GiB', small], 1, **asked))
    assert '40GiB, 1 of it reserved: fits' in text
    assert f'{format_bytes(found.peak_bytes - small + 1)} too much' in text
    assert '--spatial-parallel-size 2 fits' in text
    nothing = describe_estimate(found, [found.shares.weights], 1, **asked)
    assert nothing[-1] == '  no larger spatial group was found that fits'


def test_the_table_has_what_a_spatial_group_sends():
    asked = dict(world_size=8, spatial_parallel_size=4, crop=(512, 256))
    found = estimate_memory(
        CONFIG, **asked, batch_size=1, cfg_options=options()
    )
    said = communication(
        SegmentorNetwork(build(True)), 512, 256, 4, 2, recompute=True
    )
    assert found.traffic == said
    text = '\n'.join(describe_estimate(found, ['40GiB']))
    for name, size in (
        ('halo rows', said.halos),
        ('instead, Ulysses would send', said.ulysses),
        ('instead, ring attention', said.ring),
    ):
        (line,) = [x for x in text.splitlines() if x.startswith(name)]
        assert line.endswith(f' {format_bytes(4 * size)}')


@pytest.mark.parametrize(
    ('message', 'kwargs'),
    [
        ('spatial', dict(world_size=4, spatial_parallel_size=3)),
        (
            'BandCrossEntropyLoss',
            dict(
                world_size=2,
                spatial_parallel_size=2,
                cfg_options={
                    'model.decode_head.loss_decode.type': 'CrossEntropyLoss'
                },
            ),
        ),
        (
            'token rows',
            dict(world_size=8, spatial_parallel_size=8, crop=(32, 32)),
        ),
        ('stages 0 to 3', dict(zero_stage=4)),
        ('precision', dict(precision='fp8')),
        (
            'give the crop',
            dict(cfg_options={'model.data_preprocessor.size': None}),
        ),
        ('no with_cp', dict(recompute=True, backbone=dict(type='ERFNet'))),
    ],
)
def test_what_cannot_be_estimated_is_refused(message, kwargs):
    cfg = load_config(CONFIG)
    if 'backbone' in kwargs:
        cfg.model.backbone = kwargs.pop('backbone')
    with pytest.raises(ValueError, match=message):
        estimate_memory(cfg, **kwargs)


@pytest.mark.slow
def test_half_precision_is_what_autocast_makes_of_it():
    found = estimate_memory(
        CONFIG,
        crop=(136, 256),
        batch_size=2,
        precision='bf16',
        cfg_options=options(),
    )
    # As ZeroStrategy has it, but for the norms.
    model = build(True).bfloat16()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    normalise_in_float(model)
    step = _Step(model, (136, 256), 2, 1)
    with torch.autocast('cpu', torch.bfloat16):
        measured = allocated(step, model)
    assert found.activations.peak == pytest.approx(measured, rel=0.15)
