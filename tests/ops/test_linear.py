# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from infsa_seg.ops import linear, reference
from infsa_seg.ops.state import merge_all
from infsa_seg.ops.tokens import chunk_tokens

from .strategies import problems


def gradients(output, leaves):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(
        output.shape, dtype=output.dtype, generator=generator
    )
    return torch.autograd.grad(
        (output * weights).sum(),
        leaves,
        retain_graph=True,
        allow_unused=True,
    )


@given(problems(), st.integers(1, 7))
def test_chunked_equals_reference(problem, num_chunks):
    """Forward and gradient, discount included; tolerance 1e-10, float64."""
    args = problem.leaves()
    expected, _ = reference.linear_infsa(*args, valid=problem.valid)
    result = linear.linear_infsa(
        *args, valid=problem.valid, num_chunks=num_chunks
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    for a, b in zip(
        gradients(result, args), gradients(expected, args), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_projection_free_equals_direct(heads, tokens, width, bias, seed):
    """The same layer without keys and values; 1e-10, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        x = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    channels = heads * width
    x = normal(2, tokens, channels)
    weights = [normal(channels, channels) for _ in range(3)]
    biases = [normal(channels) if bias else None for _ in range(3)]
    discount = torch.full((heads,), 0.7, dtype=torch.float64)
    discount.requires_grad_()
    valid = torch.rand(2, tokens, generator=generator) < 0.8
    valid[:, 0] = True
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, width)).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    )
    expected, _ = reference.linear_infsa(q, k, v, discount, valid)

    query = linear.mean_query(
        linear.sum_energy(q, x, valid), weights[0], biases[0]
    )
    probe, offset = linear.probe_keys(query, weights[1], biases[1])
    scores = linear.score_inputs(x, probe, offset, width)
    context = linear.read_scores(
        linear.sum_scores(scores, x, valid), discount, weights[2], biases[2]
    )
    leaves = [x, discount, *weights, *[b for b in biases if b is not None]]
    # Padding rows of the reference are zero; a valid row is the context.
    torch.testing.assert_close(context, expected[:, :, 0], rtol=0, atol=1e-10)
    for a, b in zip(
        gradients(context, leaves),
        gradients(expected[:, :, 0], leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@given(problems(), st.integers(2, 6), st.randoms(use_true_random=False))
def test_any_merge_order(problem, num_chunks, random):
    """Sums add up to the same state in any order; 1e-12, float64."""
    parts = [
        linear.sum_energy(q, q, ok)
        for q, ok in chunk_tokens(num_chunks, problem.q, valid=problem.valid)
    ]
    whole = linear.sum_energy(problem.q, problem.q, problem.valid)
    random.shuffle(parts)
    middle = random.randrange(1, num_chunks)
    merged = merge_all(parts[middle:]).merge(merge_all(parts[:middle]))
    torch.testing.assert_close(merged.energy, whole.energy, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        merged.weighted, whole.weighted, rtol=0, atol=1e-12
    )
    assert merged.nbytes == parts[0].nbytes == whole.nbytes


def test_gradcheck():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        (
            torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=generator)
            + 1
        ).requires_grad_()
        for _ in range(3)
    )
    discount = torch.tensor([0.3, 0.8], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *args: linear.linear_infsa(*args, num_chunks=2),
        (q, k, v, discount),
    )
    assert torch.autograd.gradcheck(
        lambda *args: reference.pure_infsa(*args)[0], (q, k, v, discount)
    )


def test_dead_head_falls_back_to_mean():
    """Opposed queries and keys give no positive score, yet an answer."""
    q = torch.ones(1, 1, 4, 2, dtype=torch.float64)
    v = torch.arange(8.0, dtype=torch.float64).view(1, 1, 4, 2)
    v.requires_grad_()
    state = linear.sum_scores(
        linear.score_keys(-q, linear.mean_query(linear.sum_energy(q, q))), v
    )
    assert linear.dead_heads(state).all()
    output = linear.linear_infsa(q, -q, v, 0.5)
    expected = 0.5 * v.mean(-2, keepdim=True).expand_as(v)
    torch.testing.assert_close(output, expected)
    (grad,) = torch.autograd.grad(output.sum(), v)
    assert (grad != 0).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype):
    x = torch.randn(1, 2, 64, 8, dtype=dtype)
    energy = linear.sum_energy(x, x)
    assert energy.energy.dtype == energy.weighted.dtype == torch.float32
    assert linear.linear_infsa(x, x, x, 0.5).dtype == dtype
