# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Attention that stays as it is, and the reasons that are given."""

import pytest
import torch
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.swin import WindowMSA
from torch import nn
from torch.nn.utils import prune

from infsa_seg.layers.convert import convert

from . import foreign_layers as foreign
from .test_convert import WIDTH, Model

REFUSED = {
    'grouped-query attention, where 4 heads of queries share 2 of keys': (
        foreign.LlamaAttention
    ),
    'grouped-query attention, where 8 heads of queries share 2 of keys': (
        foreign.NewLlamaAttention
    ),
    'causal attention, where': foreign.GPT2Attention,
    'causal attention, where a token': foreign.MaskedAttention,
    'causal attention, where a token sees': foreign.MistralAttention,
    'multi-head latent attention': foreign.DeepseekV2Attention,
    'bias of relative positions': foreign.RelPosAttention,
    'a bias of relative positions': foreign.BeitAttention,
    'with a bias of relative positions': lambda dim: WindowMSA(dim, 4, (2, 2)),
    'attention with a bias of relative positions': lambda dim: BEiTAttention(
        dim, 4, (2, 2)
    ),
    'rotary positions': foreign.AttentionRope,
    'cross-attention, which is called with masks': foreign.CrossAttention,
    'forward is not softmax attention of its weights': (
        foreign.InterleavedAttention
    ),
    'is not softmax attention of its weights': foreign.SecretAttention,
    'not softmax attention of its weights': foreign.LocalAttention,
    'cannot be tried on tokens: ValueError': foreign.NestAttention,
    'answers with a tuple of another kind': foreign.TalkativeAttention,
    'forward turns (1, 6, 16) into (1, 16)': foreign.PooledAttention,
}


@pytest.mark.filterwarnings('ignore:torch.meshgrid')
@pytest.mark.parametrize('reason', REFUSED)
def test_other_kinds_are_refused_by_name(reason):
    torch.manual_seed(0)
    refused = REFUSED[reason](WIDTH)
    model = nn.ModuleList([refused, foreign.Attention(WIDTH)])
    before = list(refused.parameters())
    report = convert(model, 'softmax')
    assert [row.name for row in report.converted] == ['1']
    (row,) = report.skipped
    assert row.name == '0' and row.type == type(refused).__name__
    assert reason in row.reason
    assert model[0] is refused
    assert all(
        a is b for a, b in zip(before, refused.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match=type(refused).__name__) as error:
        convert(Model(refused))
    assert reason in str(error.value)
    assert '\n' not in str(error.value)


def test_decoders_of_pytorch_stay():
    model = nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)
    report = convert(model, 'linear')
    assert [row.name for row in report.converted] == [
        'encoder.layers.0.self_attn'
    ]
    assert [
        (row.name, row.reason.split(',')[0]) for row in report.skipped
    ] == [
        (
            'decoder.layers.0.self_attn',
            'causal attention of a decoder',
        ),
        ('decoder.layers.0.multihead_attn', 'cross-attention'),
    ]


def with_(layer, change):
    change(layer)
    return layer


class LoRA(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def heads_of_another_width(layer):
    layer.qkv = nn.Linear(WIDTH, 24)
    layer.proj = nn.Linear(8, WIDTH)


INEXACT = {
    'add_bias_kv': lambda: nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True),
    'add_zero_attn': lambda: nn.MultiheadAttention(
        WIDTH, 4, add_zero_attn=True
    ),
    'a subclass of nn.MultiheadAttention': lambda: type(
        'MyAttention', (nn.MultiheadAttention,), {}
    )(WIDTH, 4),
    'q_norm normalises': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: setattr(layer, 'q_norm', nn.LayerNorm(4)),
    ),
    'norm normalises': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: setattr(layer, 'norm', nn.LayerNorm(WIDTH)),
    ),
    'scores are scaled by 0.25, not by 0.5': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: setattr(layer, 'scale', 0.25),
    ),
    'projection qkv is a LoRA': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: setattr(layer, 'qkv', LoRA(WIDTH, 3 * WIDTH)),
    ),
    'projection qkv goes from 16 to 24 channels': lambda: with_(
        foreign.Attention(WIDTH), heads_of_another_width
    ),
    "holds 'temperature'": lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: layer.register_parameter(
            'temperature', nn.Parameter(torch.ones(4))
        ),
    ),
    'its weight is computed': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: nn.utils.parametrizations.weight_norm(layer.proj),
    ),
    'in_proj_weight is computed': lambda: with_(
        nn.MultiheadAttention(WIDTH, 4),
        lambda layer: prune.random_unstructured(layer, 'in_proj_weight', 0.5),
    ),
    'v_shortcut': lambda: with_(
        foreign.MultiheadAttention(WIDTH),
        lambda layer: setattr(layer, 'v_shortcut', True),
    ),
    'has hooks': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: layer.attn_drop.register_forward_hook(print),
    ),
    'gather what is spread': lambda: with_(
        foreign.Attention(WIDTH),
        lambda layer: setattr(
            layer.qkv, 'weight', nn.Parameter(torch.empty(0))
        ),
    ),
    'not a kind that is known': lambda: type(
        'PoolAttention', (nn.Linear,), {}
    )(4, 4),
}


@pytest.mark.parametrize('reason', INEXACT)
def test_what_cannot_be_copied_exactly_is_skipped(reason):
    layer = INEXACT[reason]()
    model = nn.ModuleList([layer, foreign.Attention(WIDTH)])
    report = convert(model, 'linear')
    assert [row.name for row in report.converted] == ['1']
    (row,) = report.skipped
    assert reason in row.reason
    assert model[0] is layer
