# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The attention layer where users of PyTorch expect nn.MultiheadAttention."""

import math

import pytest
import torch
from torch import nn

from infsa_seg.layers import InfSAAttention, identity
from infsa_seg.layers.protocol import count_context
from infsa_seg.ops import Context, reference
from infsa_seg.ops.centrality import DenseGraph, pagerank

from .test_attention import MERGEABLE, QUADRATIC, make

ALL = MERGEABLE + QUADRATIC
# One of each class; the others take their time.
EACH = [
    dict(variant='linear'),
    dict(variant='neumann'),
    dict(variant='neumann', graph='crelu', hops='inf'),
    dict(variant='neumann', graph='crelu', norm='row', hops='inf'),
    dict(variant='pure'),
    dict(variant='softmax'),
]
EACH_FIRST = [
    pytest.param(cfg, marks=() if cfg in EACH else pytest.mark.slow)
    for cfg in ALL
]
RANKING = [cfg for cfg in MERGEABLE if cfg.get('graph') != 'identity']
ONE_HOP = [cfg for cfg in ALL if cfg.get('hops', 1) == 1]


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize('cfg', ALL)
def test_self_attention_in_both_calls(cfg):
    """One tensor thrice gives what a query alone gives; 1e-12."""
    layer = make(cfg).eval()
    x = tokens(2, 7, 12)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, 5:] = True
    for ignored in (None, mask):
        alone = layer(x, key_padding_mask=ignored)
        need = cfg.get('graph') != 'identity'
        out, weights = layer(x, x, x, ignored, need_weights=need)
        torch.testing.assert_close(out, alone, rtol=0, atol=1e-12)
        fast, none = layer(x, x, x, ignored, need_weights=False)
        assert none is None and fast.equal(alone)
        if weights is not None and ignored is not None:
            assert not weights[..., 5:].any()


@pytest.mark.parametrize('cfg', ONE_HOP)
@pytest.mark.parametrize('batch_first', [True, False])
def test_layouts_and_other_widths(cfg, batch_first):
    layer = make({**cfg, 'kdim': 5, 'vdim': 7, 'batch_first': batch_first})
    layer.eval()
    query, key, value = tokens(2, 6, 12), tokens(2, 9, 5), tokens(2, 9, 7)
    mask = torch.rand(2, 9) < 0.3
    need = cfg.get('graph') != 'identity'

    def call(*tensors, mask, **kwargs):
        return layer(*tensors, mask, need_weights=need, **kwargs)

    batched = [query, key, value]
    if not batch_first:
        batched = [x.transpose(0, 1) for x in batched]
    out, weights = call(*batched, mask=mask)
    assert out.shape == batched[0].shape
    _, per_head = call(*batched, mask=mask, average_attn_weights=False)
    quadratic = cfg['variant'] in ('pure', 'softmax')
    if need:
        shape = (2, 6, 9) if quadratic else (2, 9)
        assert weights.shape == shape
        assert per_head.shape == (2, 3, *shape[1:])
        torch.testing.assert_close(per_head.mean(1), weights)
    for image in range(2):
        single, alone = call(
            query[image], key[image], value[image], mask=mask[image]
        )
        expected = out[image] if batch_first else out[:, image]
        torch.testing.assert_close(single, expected, rtol=0, atol=1e-12)
        if need:
            torch.testing.assert_close(alone, weights[image])
        # What is masked might as well not be there.
        keep = ~mask[image]
        short, _ = call(
            query[image], key[image][keep], value[image][keep], mask=None
        )
        torch.testing.assert_close(short, expected, rtol=0, atol=1e-12)


def test_masks_of_zero_and_minus_infinity():
    layer = make(dict(variant='neumann')).eval()
    x = tokens(1, 6, 12)
    ignored = torch.tensor([[False, True, False, False, True, False]])
    added = torch.zeros(1, 6).masked_fill(ignored, -torch.inf)
    assert layer(x, x, x, added)[0].equal(layer(x, x, x, ignored)[0])
    with pytest.raises(ValueError, match='other numbers than 0 and -inf'):
        layer(x, x, x, added + 1)


@pytest.mark.parametrize('hops', [1, 3, 'inf'])
def test_weights_of_pure_times_values_are_the_output(hops):
    layer = make(dict(variant='pure', hops=hops))
    x = tokens(2, 8, 12)
    out, weights = layer(x, x, x, average_attn_weights=False)
    expected = layer.join_heads(weights @ layer.values(x))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('cfg', RANKING)
def test_importance_sums_to_one_and_comes_by_bands_too(cfg):
    """From the verbs, in two bands, what need_weights gives; 1e-12."""
    layer = make(cfg).eval()
    x = tokens(2, 10, 12)
    mask = torch.rand(2, 10) < 0.2
    _, weights = layer(x, x, x, mask, average_attn_weights=False)
    if cfg['variant'] != 'linear':  # whose epsilon is in the sum
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(2, 3).double(), rtol=0, atol=1e-9
        )
    assert (weights >= 0).all()

    layer.with_importance = True
    bands, masks = x.split([3, 7], 1), (~mask).split([3, 7], 1)
    context = _context(bands, masks)
    for phase in range(layer.num_phases):
        state = layer.init_state(2, phase, x.device)
        for band, valid in zip(bands, masks, strict=True):
            state = layer.accumulate(band, state, phase, context, valid)
        context = layer.finalize(state, phase, context)
    ranks = torch.cat(
        [
            layer.importance(band, context, valid)
            for band, valid in zip(bands, masks, strict=True)
        ],
        -1,
    )
    torch.testing.assert_close(ranks, weights, rtol=0, atol=1e-12)


def _context(bands, masks):
    return count_context(list(bands), identity, list(masks))


@pytest.mark.parametrize(
    'cfg',
    [
        dict(graph='landmark', hops='inf'),
        dict(graph='crelu', norm='row', hops='inf'),
    ],
)
def test_importance_of_a_chain_is_pagerank(cfg):
    """Against the dense chain; 1e-10, float64."""
    layer = make(dict(variant='neumann', **cfg)).eval()
    x = tokens(2, 9, 12)
    _, ranks = layer(x, x, x, average_attn_weights=False)
    q, k = layer.queries(x), layer.keys(x)
    if cfg['graph'] == 'landmark':
        context = Context(torch.full((2,), 9.0).double())
        chain = reference.landmark_chain(
            layer._query_factors(q, context), layer._key_factors(k, context)
        )
    else:
        chain = reference.row_chain(layer.feature(q), layer.feature(k))
    expected = pagerank(DenseGraph(chain), layer.discount)
    torch.testing.assert_close(ranks, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize('hops', [1, 2, 'inf'])
def test_importance_of_a_graph_is_katz(hops):
    """Column sums of the dense series, scaled to one; 1e-10, float64."""
    layer = make(dict(variant='neumann', graph='crelu', hops=hops)).eval()
    x = tokens(2, 9, 12)
    _, ranks = layer(x, x, x, average_attn_weights=False)
    eye = torch.eye(9, dtype=torch.float64).expand(2, 3, 9, 9)
    series = reference.neumann_frobenius(
        layer.feature(layer.queries(x)),
        layer.feature(layer.keys(x)),
        eye,
        layer.discount,
        math.inf if hops == 'inf' else hops,
    )
    received = series.sum(-2)
    expected = received / received.sum(-1, keepdim=True)
    torch.testing.assert_close(ranks, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    'kwargs', [{'attn_mask': torch.zeros(4, 4)}, {'is_causal': True}]
)
@pytest.mark.parametrize(
    'cfg', [dict(variant='linear'), dict(variant='softmax')]
)
def test_attention_masks_are_refused(cfg, kwargs):
    layer = make(cfg)
    x = tokens(1, 4, 12)
    with pytest.raises(ValueError, match='takes no attn_mask or is_causal'):
        layer(x, x, x, **kwargs)


@pytest.mark.parametrize(
    'cfg',
    [
        dict(variant='pure', hops=2),
        dict(variant='neumann', hops='inf'),
        dict(variant='neumann', graph='crelu', hops=2),
        dict(variant='neumann', graph='crelu', norm='row', hops=2),
    ],
)
def test_walks_between_different_tokens_are_refused(cfg):
    layer = make(cfg)
    with pytest.raises(ValueError, match='as many queries'):
        layer(tokens(1, 4, 12), tokens(1, 5, 12), tokens(1, 5, 12))


def test_half_a_call_is_refused():
    layer, x = make(dict(variant='linear')), tokens(1, 4, 12)
    with pytest.raises(ValueError, match='key is given without value'):
        layer(x, x)
    with pytest.raises(ValueError, match='value is given without key'):
        layer(x, value=x)


@pytest.mark.parametrize(
    'cfg', [dict(variant='linear'), dict(variant='neumann')]
)
@pytest.mark.parametrize('training', [True, False])
def test_inside_an_encoder_layer_of_pytorch(cfg, training):
    encoder = nn.TransformerEncoderLayer(
        12, 3, 24, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    encoder.self_attn = make(cfg)
    encoder.train(training)
    x = tokens(2, 6, 12)
    ignored = torch.zeros(2, 6, dtype=torch.bool)
    ignored[:, 4:] = True
    out = encoder(x, src_key_padding_mask=ignored)
    expected = encoder(x[:, :4])
    torch.testing.assert_close(out[:, :4], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('cfg', ALL)
def test_meta_device_then_fresh_start(cfg):
    with torch.device('meta'):
        layer = InfSAAttention(12, 3, **cfg)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device='cpu')
    for module in layer.modules():
        if hasattr(module, 'reset_parameters'):
            module.reset_parameters()
    expected = InfSAAttention(12, 3, **cfg).state_dict()
    state = layer.state_dict()
    assert state.keys() == expected.keys()
    for name in ('discount_logit', 'log_temperature', 'recurrence_logit'):
        if name in expected:
            assert state[name].equal(expected[name])
    for name, buffer in layer.named_buffers():
        assert not buffer.any(), name
    assert layer(torch.randn(1, 4, 12)).isfinite().all()


@pytest.mark.parametrize('cfg', ALL)
def test_state_dict_round_trip(cfg, tmp_path):
    layer, twin = make(cfg), make(cfg, seed=1)
    x = tokens(1, 5, 12)
    layer(x)
    torch.save(layer.state_dict(), tmp_path / 'layer.pth')
    twin.load_state_dict(torch.load(tmp_path / 'layer.pth'))
    assert twin.eval()(x).equal(layer.eval()(x))


@pytest.mark.parametrize('cfg', EACH_FIRST)
def test_compiles_without_graph_breaks(cfg):
    """fullgraph=True raises at a break; the numbers stay, to 1e-10."""
    torch._dynamo.reset()
    layer = make(cfg)
    x, valid = tokens(2, 6, 12), torch.ones(2, 6, dtype=torch.bool)
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    expected = layer(x, valid=valid)
    result = compiled(x, valid=valid)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize('cfg', EACH_FIRST)
def test_exports_with_any_number_of_tokens(cfg):
    layer = make(cfg).eval()
    tokens_dim = torch.export.Dim('tokens', min=2, max=4096)
    program = torch.export.export(
        layer, (tokens(1, 6, 12),), dynamic_shapes=({1: tokens_dim},)
    )
    x = tokens(1, 11, 12)
    torch.testing.assert_close(
        program.module()(x), layer(x), rtol=0, atol=1e-10
    )


# PyTorch has no second derivative of its fused softmax attention.
@pytest.mark.parametrize(
    'cfg', [p for p in EACH_FIRST if p.values[0]['variant'] != 'softmax']
)
def test_double_backward(cfg):
    layer = make(cfg, embed_dims=4, num_heads=2)
    x = (tokens(1, 3, 4) + 0.4).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize('cfg', ALL)
def test_the_discount_of_each_head_moves_in_training(cfg):
    layer = make(cfg)
    before = layer.state_dict().get('discount_logit')
    if before is None:
        pytest.skip('no discount with softmax, or one hop of a chain')
    before = before.clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(tokens(2, 9, 12) + 0.3).square().mean().backward()
    optimizer.step()
    assert (layer.discount_logit != before).all()
