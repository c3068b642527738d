# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import math
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.ops.recurrence import (
    FREE_RATIO,
    MAX_RATIO,
    iterate_keys,
    key_recurrence,
)
from infsa_seg.ops.tokens import EPS

from .test_linear import gradients

normalizations = pytest.mark.parametrize('normalize', ['both', 'once'])


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def close(result, expected, leaves):
    """Forward and gradient, 1e-10 in float64."""
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    for leaf, a, b in zip(
        leaves,
        gradients(result, leaves),
        gradients(expected, leaves),
        strict=True,
    ):
        # One step from zero gives k, without a look at alpha.
        a = torch.zeros_like(leaf) if a is None else a
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@st.composite
def problems(draw):
    """Keys, one of them zero, and an alpha whose largest ratio is drawn."""
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    normalize = draw(st.sampled_from(['both', 'once']))
    k = normal(
        2,
        heads,
        tokens,
        draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**31)),
    )
    alpha = torch.rand(heads, dtype=torch.float64) + 0.1
    alpha /= alpha.max()
    if normalize == 'once':
        alpha /= torch.linalg.vector_norm(k, dim=-1).max()
    alpha *= draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]))
    k[0, 0, 0] = 0
    return k.requires_grad_(), alpha.requires_grad_(), normalize


@given(problems(), st.integers(1, 9))
def test_closed_form_equals_iteration(problem, steps):
    """Forward and gradient, alpha included, ratio 1 too; 1e-10, float64."""
    k, alpha, normalize = problem
    expected = iterate_keys(k, alpha, steps, normalize)
    result = key_recurrence(k, alpha, steps, normalize)
    close(result, expected, [k, alpha])


@given(problems())
def test_no_limit_of_steps_is_the_fixed_point(problem):
    """One step more changes nothing, and 1000 get there; 1e-10, float64."""
    k, alpha, normalize = problem
    alpha = 0.95 * alpha
    u = key_recurrence(k, alpha, math.inf, normalize)
    close(u, iterate_keys(k, alpha, 1, normalize, state=u), [k, alpha])
    close(u, key_recurrence(k, alpha, 1000, normalize), [k, alpha])


@normalizations
def test_formula(normalize):
    """As displayed, from any state, in numbers; 1e-12, float64."""
    k, u = normal(1, 2, 1, 3), normal(1, 2, 1, 3, seed=1)
    alpha = torch.tensor([0.3, 0.9], dtype=torch.float64)
    result = iterate_keys(k, alpha, 1, normalize, state=u)
    for head in range(2):
        a, b = k[0, head, 0].tolist(), u[0, head, 0].tolist()
        norm = math.hypot(*a) + EPS
        factor = alpha[head].item() * math.fsum(map(operator.mul, a, b))
        factor /= norm**2 if normalize == 'both' else norm
        expected = [factor * x + x for x in a]
        assert result[0, head, 0].tolist() == pytest.approx(
            expected, rel=0, abs=1e-12
        )


@normalizations
def test_fixed_points(normalize):
    """At k / (1 - alpha) and k / (1 - alpha |k|), up to eps; 1e-5."""
    k = normal(1, 2, 5, 3)
    norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    alpha = 0.5 / norm.max()
    ratio = alpha * norm if normalize == 'once' else alpha
    torch.testing.assert_close(
        key_recurrence(k, alpha, normalize=normalize),
        k / (1 - ratio),
        rtol=1e-5,
        atol=0,
    )


@given(problems(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_streamed_equals_whole(problem, first, second, num_chunks):
    """Chunks of tokens, each going on from its state; 1e-10, float64."""
    k, alpha, normalize = problem
    expected = key_recurrence(k, alpha, first + second, normalize)
    chunks = []
    for part in k.tensor_split(num_chunks, -2):
        state = key_recurrence(part, alpha, first, normalize)
        chunks.append(
            key_recurrence(part, alpha, second, normalize, state=state)
        )
    result = torch.cat(chunks, -2)
    close(result, expected, [k, alpha])


@given(problems(), st.integers(1, 6))
def test_any_state_goes_in(problem, steps):
    """Also one that is not parallel to its key; 1e-10, float64."""
    k, alpha, normalize = problem
    state = normal(*k.shape, seed=1).requires_grad_()
    expected = iterate_keys(k, alpha, steps, normalize, state)
    result = key_recurrence(k, alpha, steps, normalize, state=state)
    close(result, expected, [k, alpha, state])


@normalizations
@pytest.mark.parametrize('steps', [1, 2, 5, math.inf])
@pytest.mark.parametrize('on_divergence', ['error', 'clamp'])
def test_gradcheck(normalize, steps, on_divergence):
    """Twice, away from the zero key and from where 'clamp' sets in."""
    k = (0.5 * normal(1, 2, 3, 2)).requires_grad_()
    high = 3.0 if on_divergence == 'clamp' else 0.6
    alpha = torch.tensor([0.2, high], dtype=torch.float64).requires_grad_()

    def function(k, alpha):
        return key_recurrence(k, alpha, steps, normalize, on_divergence)

    assert torch.autograd.gradcheck(function, (k, alpha))
    assert torch.autograd.gradgradcheck(function, (k, alpha))


@normalizations
@pytest.mark.parametrize('steps', [1, 7, math.inf])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('size', [0.0, 1e-30, 1e-8, EPS])
def test_keys_of_no_length(normalize, steps, dtype, size):
    """A zero key stays zero, with a gradient of one and none for alpha."""
    k = torch.full((1, 1, 2, 3), size, dtype=dtype).requires_grad_()
    alpha = torch.tensor([0.9], dtype=dtype).requires_grad_()
    for on_divergence in ('error', 'clamp'):
        u = key_recurrence(k, alpha, steps, normalize, on_divergence)
        assert torch.isfinite(u).all()
        grad_k, grad_alpha = torch.autograd.grad(
            u.sum() + 0 * alpha.sum(), [k, alpha]
        )
        assert torch.isfinite(grad_k).all() and torch.isfinite(grad_alpha)
        if size == 0:
            assert (u == 0).all() and grad_alpha == 0
            assert (grad_k == 1).all()


def unit_keys(dtype=torch.float32):
    """Keys of length one, and so a ratio of alpha, up to eps."""
    return torch.nn.functional.normalize(normal(1, 1, 6, 4), dim=-1).to(dtype)


@normalizations
@pytest.mark.parametrize('excess', [-1e-3, -1e-6, 0.0, 1e-6, 1e-3])
def test_finite_steps_near_a_ratio_of_one(normalize, excess):
    """1000 steps, float32 against float64: relative error 1e-3.

    The ratio alone, rounded to 6e-8, is off by 1000 times that.
    """
    results = []
    for dtype in (torch.float32, torch.float64):
        k = unit_keys().to(dtype).requires_grad_()
        alpha = torch.tensor([1 + EPS + excess]).to(dtype).requires_grad_()
        u = key_recurrence(k, alpha, 1000, normalize)
        results.append([u, *torch.autograd.grad(u.abs().sum(), [k, alpha])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(
            a,
            b,
            rtol=1e-3,
            atol=1e-3 * b.abs().max().item(),
            check_dtype=False,
        )


def test_refuses_what_has_no_fixed_point():
    k = torch.full((1, 2, 1, 4), 2.0)  # |k| = 4
    fine = key_recurrence(k, torch.tensor([0.1, 0.2]), normalize='once')
    torch.testing.assert_close(
        fine, k / torch.tensor([0.6, 0.2])[:, None, None]
    )
    with pytest.raises(
        ValueError,
        match=r"alpha \* \|k\| reaches 1.2, and normalize='once' has a fixed "
        r"point only below 1: lower alpha, .* on_divergence='clamp'",
    ):
        key_recurrence(k, torch.tensor([0.1, 0.3]), normalize='once')
    # 'both' does not mind how long a key is.
    assert key_recurrence(1e9 * k, 0.9).isfinite().all()
    with pytest.raises(ValueError, match=r"alpha reaches 1.5, .*='both'"):
        key_recurrence(k, 1.5)
    # A number of steps has a result whatever the ratio, if there is room.
    steps = key_recurrence(k, 0.5, 10, 'once')
    torch.testing.assert_close(steps, 1023 * k, rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match=r'after steps=200 are beyond torch.f'
    ):
        key_recurrence(k, 0.5, 200, 'once')
    with pytest.raises(ValueError, match=r'steps=20 are beyond torch.float16'):
        key_recurrence(k.half(), 0.5, 20, 'once')


@pytest.mark.parametrize('steps', [1, 20, 1000, math.inf])
def test_clamp_keeps_every_key_finite(steps):
    """Ratios up to 3e4: at most 100-fold, and alpha still learns."""
    length = torch.logspace(-3, 4, 50).view(1, 1, -1, 1)
    k = (length * unit_keys()[:, :, :1]).requires_grad_()
    alpha = torch.tensor([3.0]).requires_grad_()
    u = key_recurrence(k, alpha, steps, 'once', 'clamp')
    gain = torch.linalg.vector_norm(u, dim=-1).squeeze() / length.squeeze()
    assert gain.max() <= 1 / (1 - MAX_RATIO) + 1e-2
    if steps == 1:
        return  # u = k
    # 1e-3: where the ratio is near its bound, 1 - ratio is rounded.
    assert (gain.diff() > -1e-3 * gain[1:]).all()
    by_token = torch.autograd.functional.jacobian(
        lambda alpha: key_recurrence(k, alpha, steps, 'once', 'clamp').norm(
            dim=-1
        ),
        alpha,
    )
    assert by_token.isfinite().all() and (by_token > 0).all()
    for grad in torch.autograd.grad(u.sum(), [k, alpha]):
        assert grad.isfinite().all()


@normalizations
@pytest.mark.parametrize('steps', [3, math.inf])
def test_clamp_leaves_small_ratios_alone(normalize, steps):
    """Bit for bit up to 0.9, then value and slope go on without a jump."""
    k = unit_keys(torch.float64)

    def gain(ratio):
        alpha = torch.tensor(ratio, dtype=torch.float64).requires_grad_()
        values = []
        for on_divergence in ('error', 'clamp'):
            u = key_recurrence(k, alpha, steps, normalize, on_divergence)
            slope = torch.autograd.grad(u.abs().sum(), alpha)[0]
            values.append((u, slope))
        return values

    (free, free_slope), (clamped, slope) = gain(FREE_RATIO)
    assert torch.equal(free, clamped) and torch.equal(free_slope, slope)
    (_, _), (after, slope_after) = gain(FREE_RATIO + 1e-5)
    torch.testing.assert_close(after, clamped, rtol=2e-4, atol=0)
    torch.testing.assert_close(slope_after, slope, rtol=1e-3, atol=0)
    (free, _), (clamped, _) = gain(0.98)
    assert (clamped.abs() < free.abs()).all()


@normalizations
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(normalize, dtype):
    """Computed in float32: one rounding, at the end; squares may overflow."""
    k = normal(1, 2, 5, 4).to(dtype)
    u = key_recurrence(k, 0.2, 5, normalize)
    assert u.dtype == dtype
    expected = key_recurrence(k.double(), 0.2, 5, normalize)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(u.double(), expected, rtol=eps, atol=0)
    # A stream in float32 is not rounded between its parts.
    state = key_recurrence(k, 0.2, 2, normalize, state=torch.zeros(k.shape))
    assert state.dtype == torch.float32
    state = key_recurrence(k, 0.2, 3, normalize, state=state)
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=0)

    large = torch.full((1, 1, 2, 4), 3e4, dtype=dtype)
    for steps in (4, math.inf):
        u = key_recurrence(large, 0.9, steps, normalize, 'clamp')
        assert u.isfinite().all() and (u >= large).all()


def test_compiles_in_one_piece():
    """With 'clamp', nothing looks at the numbers; 'error' still refuses."""
    k, alpha = unit_keys(), torch.tensor([0.7])

    @torch.compile(backend='eager', fullgraph=True)
    def clamp(k, alpha, steps):
        return key_recurrence(k, alpha, steps, 'once', 'clamp')

    for steps in (3, math.inf):
        torch.testing.assert_close(
            clamp(k, alpha, steps), key_recurrence(k, alpha, steps, 'once')
        )

    @torch.compile(backend='eager')
    def error(k, alpha):
        return key_recurrence(k, alpha, math.inf, 'once')

    torch.testing.assert_close(
        error(k, alpha), key_recurrence(k, alpha, normalize='once')
    )
    with pytest.raises(ValueError, match='has a fixed point only below 1'):
        error(k, 2 * alpha)


def test_empty_and_unknown():
    assert key_recurrence(torch.ones(1, 2, 0, 3), 0.5).shape == (1, 2, 0, 3)
    k = torch.ones(1, 1, 1, 1)
    for steps in (0, -1, 1.5, math.nan):
        with pytest.raises(ValueError, match=f'steps={steps} is no positive'):
            key_recurrence(k, 0.5, steps)
    with pytest.raises(ValueError, match="normalize='never' is unknown"):
        key_recurrence(k, 0.5, normalize='never')
    with pytest.raises(ValueError, match="on_divergence='pass' is unknown"):
        key_recurrence(k, 0.5, on_divergence='pass')
