# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A masked collar of any extent changes nothing inside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infsa_seg.layers import (
    FFN,
    Block,
    GlobalBranch,
    InfSAAttention,
    LocalBranch,
    identity,
)
from infsa_seg.layers.protocol import count_context

from .test_attention import MERGEABLE, QUADRATIC

WIDTH = 12
margins = st.tuples(*[st.integers(0, 5)] * 4)


def blocks(cfg):
    """Two blocks with convolutions, with an extent learnt elsewhere."""
    torch.manual_seed(1)
    network = nn.ModuleList(
        Block(
            GlobalBranch(
                nn.LayerNorm(WIDTH),
                InfSAAttention(WIDTH, 3, **cfg),
                nn.Identity(),
            ),
            LocalBranch(
                nn.LayerNorm(WIDTH),
                FFN(WIDTH, 2 * WIDTH, kind='dwconv'),
                nn.Identity(),
            ),
        )
        for _ in range(2)
    )
    run(network, torch.randn(1, 3, 4, WIDTH))
    return network.eval()


def run(network, x, valid=None):
    context = count_context([x], identity, [valid])
    for block in network:
        x = block.attn(x, valid=valid, context=context)
        x = block.ffn(x, valid=valid)
    return x


@pytest.mark.parametrize('cfg', MERGEABLE + QUADRATIC)
@settings(max_examples=10)
@given(margins, st.sampled_from([0.0, 1e3, float('nan')]))
def test_a_collar_changes_nothing_inside(cfg, margin, filling):
    """Whatever it holds; 1e-6 in float32, as the sums may change order."""
    network = blocks(cfg)
    inside = torch.randn(2, 5, 6, WIDTH)
    above, below, left, right = margin
    grown = torch.full(
        (2, above + 5 + below, left + 6 + right, WIDTH), filling
    )
    rows, columns = slice(above, above + 5), slice(left, left + 6)
    grown[:, rows, columns] = inside
    valid = torch.zeros(grown.shape[:-1], dtype=torch.bool)
    valid[:, rows, columns] = True
    with torch.no_grad():
        expected = run(network, inside)
        result = run(network, grown, valid)[:, rows, columns]
    scale = expected.abs().max()
    torch.testing.assert_close(
        result / scale, expected / scale, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize('cfg', MERGEABLE)
def test_masked_tokens_leave_every_state_untouched(cfg):
    """A band of nothing but collar adds zeros, exactly."""
    torch.manual_seed(1)
    layer = InfSAAttention(WIDTH, 3, **cfg).eval()
    x = torch.randn(2, 4, WIDTH)
    context = count_context([x], identity, [None])
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for phase in range(layer.num_phases):
        start = layer.init_state(2, phase, x.device)
        state = layer.accumulate(x, start, phase, context)
        for filling in (1e4, float('nan')):
            collar = torch.full((2, 3, WIDTH), filling)
            after = layer.accumulate(collar, state, phase, context, nothing)
            for name, total in state._fields().items():
                assert after._fields()[name].equal(total), name
        context = layer.finalize(state, phase, context)
