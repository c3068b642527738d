# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Half precision, extremes and degenerate input, against float64.

Inputs are rounded to the dtype under test first, and the same numbers are
given to the float64 run: what is measured is the arithmetic, not the rounding
of the input.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from infsa_seg.ops import (
    FEATURE_MAPS,
    landmark_keys,
    landmark_queries,
    landmark_temperature,
    linear,
    linear_infsa,
    neumann,
    neumann_chain,
    neumann_graph,
    neumann_rows,
    pure_infsa,
    reference,
)

HEADS, WIDTH, LANDMARKS = 2, 16, 8
Operator = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def landmark(q, k, v, valid=None, *, hops=1):
    generator = torch.Generator().manual_seed(5)
    # In a half-precision model parameters are rounded too.
    heads, width = q.shape[1], q.shape[3]
    landmarks = torch.randn(heads, LANDMARKS, width, generator=generator)
    landmarks = landmarks.bfloat16().half().to(q.dtype)
    # Exact in every dtype.
    log_tau = torch.full((heads,), 2.25, dtype=q.dtype)
    tau = landmark_temperature(log_tau)
    return neumann_chain(
        landmark_queries(q, landmarks, tau),
        landmark_keys(k, landmarks, tau),
        v,
        0.9,
        hops,
        valid,
    )


def features(q, k, v, valid=None, *, name, operator, hops=1):
    feature, _ = FEATURE_MAPS[name]
    return operator(feature(q), feature(k), v, 0.9, hops, valid)


OPERATORS: dict[str, Operator] = {
    'linear': lambda q, k, v, valid=None: linear_infsa(q, k, v, 0.9, valid),
    'landmark': landmark,
    'landmark-inf': functools.partial(landmark, hops=math.inf),
    'crelu': functools.partial(features, name='crelu', operator=neumann_graph),
    'crelu-inf': functools.partial(
        features, name='crelu', operator=neumann_graph, hops=math.inf
    ),
    'identity': functools.partial(
        features, name='identity', operator=neumann_graph
    ),
    'relu-row': functools.partial(
        features, name='relu', operator=neumann_rows
    ),
    'focused-row-inf': functools.partial(
        features, name='focused', operator=neumann_rows, hops=math.inf
    ),
}
QUADRATIC: dict[str, Operator] = {
    'pure': lambda q, k, v, valid=None: pure_infsa(q, k, v, 0.9, valid)[0],
    'pure-inf': lambda q, k, v, valid=None: pure_infsa(
        q, k, v, 0.9, valid, hops=math.inf
    )[0],
}
ALL = {**OPERATORS, **QUADRATIC}

# Largest error relative to the largest value of the float64 result, of output
# and gradient. Sums are float32 throughout, so that half precision adds no
# more than the rounding of the result: half a unit in the last place, which is
# 2^-8 in bfloat16 and 2^-11 in float16. A gradient is rounded twice.
FLOAT32 = 2e-5, 2e-4
BOUNDS = {
    torch.float32: FLOAT32,
    torch.bfloat16: (2**-8 + FLOAT32[0], 2**-7 + FLOAT32[1]),
    torch.float16: (2**-11 + FLOAT32[0], 2**-10 + FLOAT32[1]),
}


@dataclasses.dataclass
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor

    def run(
        self, operator: Operator, dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor]]:
        """Output and gradients of q, k, v; a loss of weighted outputs."""
        leaves = [
            x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)
        ]
        out = operator(*leaves)
        assert out.dtype == dtype
        (out * self.weights.to(dtype)).sum().backward()
        return out, [x.grad for x in leaves]


def case(
    num_tokens: int,
    scale: float,
    dtype: torch.dtype,
    mean: float = 0.3,
    heads: int = HEADS,
    width: int = WIDTH,
) -> Case:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (1, heads, num_tokens, width)

    def normal() -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    tensors = [scale * (normal() + mean), scale * (normal() + mean)]
    # A mean that does not cancel, or there would be nothing to be relative to.
    tensors.append(normal() + 0.5)
    return Case(
        *(x.to(dtype).double() for x in tensors),
        weights=normal().to(dtype).double() / math.sqrt(num_tokens),
    )


def relative_error(result: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp_min(1e-30)
    return ((result.double() - expected).abs().max() / scale).item()


def compare(
    name: str,
    problem: Case,
    dtype: torch.dtype,
    kinks: int = 0,
    loss: float = 1.0,
) -> None:
    """Hold a run against float64.

    Args:
        name: which operator.
        problem: its input.
        dtype: of the run.
        kinks: how many tokens may have another gradient, because a score
            within rounding of zero falls to the other side of a ReLU.
        loss: factor by which gradients may be worse.
    """
    out, grads = problem.run(ALL[name], dtype)
    expected, expected_grads = problem.run(ALL[name], torch.float64)
    assert out.isfinite().all() and out.any()
    forward, backward = BOUNDS[dtype]
    backward *= loss
    assert relative_error(out, expected) <= forward
    for which, grad, exact in zip('qkv', grads, expected_grads, strict=True):
        assert grad.isfinite().all()
        # float16 cannot hold what is smaller than 6e-8; such a gradient has
        # no meaning in it.
        if dtype == torch.float16 and exact.abs().max() < 1e-4:
            continue
        errors = (grad.double() - exact).abs().amax((0, 1, 3))
        worst = errors.sort().values[-1 - kinks]
        assert worst <= backward * exact.abs().max(), which


@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('scale', [0.1, 1.0, 30.0])
@pytest.mark.parametrize('name', ALL)
def test_scales_and_dtypes(name, scale, dtype):
    compare(name, case(257, scale, dtype), dtype)


def check_many_tokens(name: str, dtype: torch.dtype) -> None:
    """As many as 9216 x 9216 pixels have in patches of 16.

    Means over so many random tokens are nearly the same, and their
    differences, which are the gradient of a query, lose digits.
    """
    problem = case(331_776, 1.0, dtype, heads=1, width=8)
    compare(name, problem, dtype, kinks=2, loss=5.0)


@pytest.mark.parametrize('name', ['linear', 'landmark'])
def test_a_third_of_a_million_tokens(name):
    check_many_tokens(name, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('name', OPERATORS)
def test_a_third_of_a_million_tokens_each(name, dtype):
    check_many_tokens(name, dtype)


TINY = 1e-4  # queries and keys of this size have scores of 1e-8


@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('name', ALL)
def test_scores_of_1e_8(name, dtype):
    """Epsilon is as large as the sums here; it acts as it does in float64."""
    problem = case(100, TINY, dtype)
    out, _ = problem.run(ALL[name], dtype)
    expected, _ = problem.run(ALL[name], torch.float64)
    assert out.any() and out.isfinite().all()
    assert relative_error(out, expected) <= BOUNDS[dtype][0]


@pytest.mark.parametrize('name', ALL)
def test_norms_that_overflow_float16_when_squared(name):
    """|q|^2 = 1e6 has no float16; its sums have to be made in float32."""
    problem = case(60, 250.0, torch.float16)
    assert problem.q.square().sum(-1).max() > torch.finfo(torch.float16).max
    compare(name, problem, torch.float16)


@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
@pytest.mark.parametrize('name', ALL)
def test_one_token(name, dtype):
    """It gets itself; what q and k could change cancels out, to rounding."""
    problem = case(1, 1.0, dtype, mean=2.0)
    out, grads = problem.run(ALL[name], dtype)
    expected, exact = problem.run(ALL[name], torch.float64)
    forward, backward = BOUNDS[dtype]
    assert relative_error(out, expected) <= forward
    scale = torch.cat(exact).abs().max()
    for grad, other in zip(grads, exact, strict=True):
        assert (grad - other).abs().max() <= backward * scale


@pytest.mark.parametrize('name', ALL)
@pytest.mark.parametrize('batch', [0, 2])
def test_nothing_at_all(name, batch):
    """No tokens, or no images: an empty result, no error."""
    tokens = 0 if batch else 5
    q, k, v = (
        torch.randn(batch, HEADS, tokens, WIDTH, requires_grad=True)
        for _ in range(3)
    )
    out = ALL[name](q, k, v)
    assert out.shape == v.shape
    out.sum().backward()
    assert v.grad.shape == v.shape


@pytest.mark.parametrize('name', ALL)
def test_all_tokens_masked(name):
    """Zeros, and gradients of zero, beside an image that is whole."""
    leaves = [torch.randn(2, HEADS, 7, WIDTH, requires_grad=True)]
    leaves += [torch.randn_like(leaves[0]).requires_grad_() for _ in range(2)]
    valid = torch.tensor([[False], [True]]).expand(2, 7)
    out = ALL[name](*leaves, valid)
    assert not out[0].any() and out[1].any()
    torch.testing.assert_close(out[1:], ALL[name](*(x[1:] for x in leaves)))
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and not leaf.grad[0].any()


# A head without a positive score falls back to the mean over the tokens. Rows
# have no discount with one hop, and many hops add up to g / (1 - g) times it.
FALLBACKS = {
    'linear': 0.9,
    'pure': 0.9,
    'pure-inf': 9.0,
    'crelu': 0.9,
    'crelu-inf': 9.0,
    'identity': 0.9,
    'relu-row': 1.0,
    'focused-row-inf': 1.0,
}


@pytest.mark.parametrize('name', FALLBACKS)
def test_zero_queries_fall_back_to_the_mean(name):
    q = torch.zeros(1, HEADS, 6, WIDTH, requires_grad=True)
    k, v = (torch.randn(1, HEADS, 6, WIDTH).requires_grad_() for _ in 'kv')
    valid = torch.tensor([[True, True, True, True, False, True]])
    out = ALL[name](q, k, v, valid)
    mean = v[:, :, valid[0]].mean(-2, keepdim=True) * FALLBACKS[name]
    expected = mean.expand_as(v) * valid[0][:, None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert v.grad.any()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize('name', ['linear', 'pure', 'pure-inf', 'relu-row'])
def test_negative_scores_fall_back_to_the_mean(name):
    """No key meets any query: a dead head, to the published formulas."""
    q = torch.rand(1, HEADS, 6, WIDTH) + 0.1
    k, v = -q, torch.randn(1, HEADS, 6, WIDTH, requires_grad=True)
    out = ALL[name](q, k, v)
    mean = v.mean(-2, keepdim=True) * FALLBACKS[name]
    torch.testing.assert_close(out, mean.expand_as(v), rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert v.grad.any()


def test_dead_heads_are_told_apart():
    """The detectors behind the counters of the layers."""
    q = torch.rand(1, 2, 5, WIDTH) + 0.1
    k = torch.stack([q[:, 0], -q[:, 0]], 1)
    scores = linear.score_keys(k, q.mean(-2))
    state = linear.sum_scores(scores, k)
    assert linear.dead_heads(state).tolist() == [[False, True]]
    relu, _ = FEATURE_MAPS['relu']
    graph = neumann.sum_graph(relu(q), relu(k), k)
    assert neumann.dead_graphs(graph).tolist() == [[False, True]]
    _, dead = reference.pure_scores(q, k, 0.9)
    assert dead.tolist() == [[False, True]]


def test_a_landmark_that_all_keys_turn_away_from():
    """exp(60 (cos - 1)) is zero in float32; the walk goes on all the same."""
    landmarks = torch.zeros(1, 2, WIDTH)
    landmarks[0, 0, 0], landmarks[0, 1, 1] = 1, 1
    keys = torch.randn(1, 1, 50, WIDTH) * 0.1
    keys[..., 0] -= 2
    tau = torch.full((1, 1, 1, 1), 60.0)
    phi_k = landmark_keys(keys, landmarks, tau)
    state = neumann.sum_chain(phi_k, torch.ones(1, 1, 50, 3))
    readout = neumann.read_chain(state, None, 1)
    torch.testing.assert_close(readout, torch.ones_like(readout))
    # Not even a billion tokens on top of a landmark overflow.
    on_top = landmark_keys(landmarks[:, None, 0:1], landmarks, tau)
    assert on_top.max() * 1e9 * 1e6 < torch.finfo(torch.float32).max
