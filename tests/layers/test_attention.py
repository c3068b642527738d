# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.layers import GlobalOp, InfSAAttention, identity, run_global
from infsa_seg.layers.protocol import count_context

HEADS = 3  # of the recorded reference module
MERGEABLE = [
    dict(variant='linear'),
    dict(variant='linear', projection_free=False),
    dict(variant='neumann'),
    dict(variant='neumann', hops=3),
    dict(variant='neumann', hops='inf', num_landmarks=5, log_n=False),
    dict(variant='neumann', graph='crelu'),
    dict(variant='neumann', graph='crelu', hops=2),
    dict(variant='neumann', graph='crelu', hops='inf'),
    dict(variant='neumann', graph='relu', norm='row'),
    dict(variant='neumann', graph='focused', norm='row', hops=3),
    dict(variant='neumann', graph='crelu', norm='row', hops='inf'),
    dict(variant='neumann', graph='identity', hops='inf'),
    dict(variant='linear', key_recurrence=dict(normalize='once', alpha=0.4)),
    dict(
        variant='neumann',
        graph='crelu',
        key_recurrence=dict(normalize='once', steps=3),
    ),
]
QUADRATIC = [
    dict(variant='pure'),
    dict(variant='pure', hops=3, key_recurrence=dict(normalize='once')),
    dict(variant='pure', hops='inf'),
    dict(variant='softmax'),
]


def make(cfg, seed=0, embed_dims=12, num_heads=3):
    torch.manual_seed(seed)
    return InfSAAttention(embed_dims, num_heads, **cfg).double()


@pytest.mark.parametrize('variant', ['pure_infsa', 'linear_infsa'])
def test_reference_state_dict_and_output(shared, variant):
    """The reference module's weights and output; 1e-6, float32."""
    golden = np.load(shared / 'golden' / 'module.npz')
    start = f'{variant}/state_dict/'
    state = {
        key.removeprefix(start): torch.from_numpy(golden[key])
        for key in golden.files
        if key.startswith(start)
    }
    x, y = (torch.from_numpy(golden[f'{variant}/{n}']) for n in 'xy')
    layer = InfSAAttention(48, HEADS, variant=variant[:-6])
    assert not any(layer.load_state_dict(state))
    torch.testing.assert_close(layer.discount, torch.full((HEADS,), 0.9))
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-6)


@pytest.mark.parametrize('cfg', MERGEABLE)
@given(data=st.data())
def test_bands_equal_whole(cfg, data):
    """Bands in any order, masked, forward and gradient; 1e-10, float64."""
    seed = data.draw(st.integers(0, 2**31))
    layer = make(cfg, seed)
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    x = torch.randn(2, rows, columns, 12).double().requires_grad_()
    valid = None
    if data.draw(st.booleans()):
        valid = torch.rand(2, rows, columns) < 0.7
        valid[:, 0] = True
    heights = []
    while sum(heights) < rows:
        heights.append(data.draw(st.integers(1, rows - sum(heights))))
    order = data.draw(st.permutations(range(len(heights))))

    whole = layer(x, valid=valid)
    bands = x.split(heights, 1)
    masks = [None] * len(bands) if valid is None else valid.split(heights, 1)
    outputs = run_global(
        layer,
        [bands[i] for i in order],
        valid=[masks[i] for i in order],
    )
    banded = torch.cat([outputs[order.index(i)] for i in range(len(bands))], 1)
    if valid is not None:
        banded = banded.masked_fill(~valid[..., None], 0)
    torch.testing.assert_close(banded, whole, rtol=0, atol=1e-10)

    weights = torch.randn_like(whole)
    leaves = [x, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad((banded * weights).sum(), leaves),
        torch.autograd.grad((whole * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('cfg', MERGEABLE)
def test_state_is_independent_of_the_number_of_tokens(cfg):
    layer = make(cfg)
    assert isinstance(layer, GlobalOp)
    sizes = set()
    for rows in (1, 7, 50):
        x = torch.randn(2, rows, 3, 12).double()
        context = count_context([x], identity, [None])
        for phase in range(layer.num_phases):
            state = layer.init_state(2, phase, x.device)
            empty = state.nbytes
            state = layer.accumulate(x, state, phase, context)
            assert state.nbytes == 2 * empty  # float64 sums of float64 tokens
            sizes.add((phase, state.nbytes))
            context = layer.finalize(state, phase, context)
    assert len(sizes) == layer.num_phases


@pytest.mark.parametrize('cfg', MERGEABLE + QUADRATIC)
def test_masked_tokens_have_no_influence(cfg):
    """Whatever stands in a collar, NaN included; 1e-12, float64."""
    layer = make(cfg).eval()
    x = torch.randn(2, 6, 12).double()
    valid = torch.tensor([True, True, True, True, False, False]).expand(2, 6)
    inside = layer(x[:, :4])
    for collar in (0.0, 1e6, torch.nan):
        y = x.clone()
        y[:, 4:] = collar
        torch.testing.assert_close(
            layer(y, valid=valid)[:, :4], inside, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize('cfg', MERGEABLE + QUADRATIC)
def test_every_parameter_learns(cfg):
    """Nothing is cut off from the loss, the discount least of all."""
    layer = make(cfg)
    x = torch.randn(2, 9, 12).double() + 0.3
    (layer(x) * torch.randn(2, 9, 12)).sum().backward()
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        # A softmax over keys, and a map over them, ignores a shift of both.
        if name == 'k_proj.bias' and cfg['variant'] == 'softmax':
            continue
        assert (grad != 0).any(), name


def test_landmark_with_one_hop_has_no_discount():
    assert make(dict(variant='neumann')).discount_logit is None
    assert make(dict(variant='neumann', hops=2)).discount_logit.shape == (3,)


def test_projection_free_equals_direct():
    """The same weights in both forms; 1e-12, float64."""
    free = make(dict(variant='linear'))
    direct = make(dict(variant='linear', projection_free=False))
    direct.load_state_dict(free.state_dict())
    x = torch.randn(2, 40, 12).double()
    torch.testing.assert_close(free(x), direct(x), rtol=0, atol=1e-12)


def test_dead_heads_are_counted_in_training():
    layer = make(dict(variant='linear', qkv_bias=False))
    with torch.no_grad():
        layer.k_proj.weight.copy_(-layer.q_proj.weight)
    x = torch.ones(2, 5, 12).double()
    layer(x)
    assert layer.num_dead.item() == 6
    layer.eval()(x)
    assert layer.num_dead.item() == 6


def test_extent_is_learnt_in_training_only():
    layer = make(dict(variant='neumann'))
    layer(torch.randn(1, 16, 12).double())
    layer(torch.randn(1, 9, 12).double())
    assert layer.num_tokens_ref.item() == 16
    layer.eval()(torch.randn(1, 400, 12).double())
    assert layer.num_tokens_ref.item() == 16
    fresh = make(dict(variant='neumann'), seed=1)
    fresh.load_state_dict(layer.state_dict())
    assert fresh.num_tokens_ref.item() == 16


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_extent_survives_half_precision(dtype):
    """Neither could hold the number: float16 ends at 65,504."""
    layer = make(dict(variant='neumann'), embed_dims=3)
    layer(torch.zeros(1, 331_777, 3).double())
    assert layer.to(dtype).num_tokens_ref.item() == 331_777
    twin = make(dict(variant='neumann'), embed_dims=3).to(dtype)
    twin.load_state_dict(layer.state_dict())
    assert twin.float().num_tokens_ref.item() == 331_777


def test_temperature_counts_valid_tokens_only():
    layer = make(dict(variant='neumann'))
    layer(torch.randn(1, 16, 12).double())
    layer.eval()
    x = torch.randn(1, 300, 12).double()
    valid = torch.arange(300).lt(50)[None]
    torch.testing.assert_close(
        layer(x, valid=valid)[:, :50], layer(x[:, :50]), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize('cfg', MERGEABLE)
def test_autocast_keeps_float32_sums(cfg):
    layer = make(cfg).float()
    x = torch.randn(2, 64, 12)
    exact = layer(x)
    with torch.autocast('cpu', torch.bfloat16):
        state = layer.accumulate(
            x,
            layer.init_state(2, 0, x.device),
            0,
            count_context([x], identity, [None]),
        )
        rough = layer(x)
    assert all(t.dtype == torch.float32 for t in state._fields().values())
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize('cfg', MERGEABLE + QUADRATIC)
def test_copy_and_pickle(cfg):
    layer = make(cfg)
    x = torch.randn(1, 4, 12).double()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert twin(x).equal(layer(x))


@pytest.mark.parametrize('cfg', QUADRATIC)
def test_quadratic_attention_refuses_parts(cfg):
    layer = make(cfg)
    assert not isinstance(layer, GlobalOp)
    with pytest.raises(ValueError, match="use 'linear' or 'neumann'"):
        layer(torch.randn(1, 4, 12).double(), merge=lambda state: state)


@pytest.mark.parametrize(
    ('cfg', 'message'),
    [
        (dict(variant='quick'), "variant='quick' is unknown"),
        (dict(embed_dims=10), 'not a multiple of num_heads=3'),
        (dict(discount=1.0), r'discount=1.0 is not inside \(0, 1\)'),
        (dict(rho=0.0), r'discount=0.0 is not inside \(0, 1\)'),
        (dict(hops=0), 'no positive integer'),
        (dict(hops=1.5), 'no positive integer'),
        (dict(graph='cosine'), "graph='cosine' is unknown"),
        (dict(graph='relu', norm='max'), "norm='max' is unknown"),
        (dict(norm='frobenius'), 'a Markov chain by itself'),
        (dict(graph='identity', norm='row'), 'is signed'),
        (dict(key_recurrence={}), 'direction of a key only'),
        (
            dict(variant='linear', key_recurrence=dict(step=2)),
            "no option 'step'",
        ),
        (
            dict(variant='linear', key_recurrence=dict(alpha=1)),
            r'alpha=1 is not inside \(0, 1\)',
        ),
    ],
)
def test_bad_arguments(cfg, message):
    with pytest.raises(ValueError, match=message):
        InfSAAttention(**{'embed_dims': 12, 'num_heads': 3, **cfg})


def test_options_of_another_variant_are_refused():
    with pytest.raises(TypeError, match='num_landmarks'):
        InfSAAttention(12, 3, variant='linear', num_landmarks=4)
