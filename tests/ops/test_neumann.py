# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.ops import graphs, neumann, reference
from infsa_seg.ops.centrality import DenseGraph, pagerank
from infsa_seg.ops.state import merge_all
from infsa_seg.ops.tokens import as_discount, chunk_tokens, hide

from .strategies import problems
from .test_linear import gradients

hops_of = st.sampled_from([1, 2, 5, math.inf])


def landmark_factors(problem, num_tokens=None):
    log_tau = torch.full(
        problem.landmarks.shape[:1], math.log(4.0), dtype=torch.float64
    )
    tau = graphs.landmark_temperature(
        log_tau, num_tokens, torch.tensor(9.0, dtype=torch.float64)
    )
    return (
        graphs.landmark_queries(problem.q, problem.landmarks, tau),
        graphs.landmark_keys(problem.k, problem.landmarks, tau),
    )


@given(problems(), hops_of, st.integers(1, 7))
def test_landmark_equals_dense_chain(problem, hops, num_chunks):
    """Against the N x N chain, hop by hop or by solve; 1e-10, float64."""
    leaves = [*problem.leaves(), problem.landmarks.requires_grad_()]
    phi_q, phi_k = landmark_factors(problem)
    result = neumann.neumann_chain(
        phi_q,
        phi_k,
        problem.v,
        problem.discount,
        hops,
        problem.valid,
        num_chunks,
    )
    chain = reference.landmark_chain(
        hide(phi_q, problem.valid), hide(phi_k, problem.valid)
    )
    expected = reference.neumann_series(
        chain,
        hide(problem.v, problem.valid),
        as_discount(problem.discount, problem.v),
        hops,
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    for a, b in zip(
        gradients(result, leaves), gradients(expected, leaves), strict=True
    ):
        if hops == 1 and a is None:
            continue  # one hop has no use for the discount
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


features_of = st.sampled_from(sorted(graphs.FEATURE_MAPS))


@given(problems(), features_of, hops_of, st.integers(1, 7))
def test_graph_equals_dense_graph(problem, name, hops, num_chunks):
    """Woodbury against the N x N solve; 1e-10, float64."""
    leaves = problem.leaves()
    feature, _ = graphs.FEATURE_MAPS[name]
    phi_q, phi_k = feature(problem.q), feature(problem.k)
    result = neumann.neumann_graph(
        phi_q,
        phi_k,
        problem.v,
        problem.discount,
        hops,
        problem.valid,
        num_chunks,
    )
    expected = reference.neumann_frobenius(
        phi_q, phi_k, problem.v, problem.discount, hops, problem.valid
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    for a, b in zip(
        gradients(result, leaves), gradients(expected, leaves), strict=True
    ):
        assert_gradients_close(a, b)


@given(
    problems(),
    st.sampled_from(['crelu', 'focused', 'relu']),
    hops_of,
    st.integers(1, 7),
)
def test_rows_equal_dense_chain(problem, name, hops, num_chunks):
    """Two phases against the N x N chain, dangling rows too; 1e-10."""
    leaves = problem.leaves()
    feature, _ = graphs.FEATURE_MAPS[name]
    phi_q, phi_k = feature(problem.q), feature(problem.k)
    result = neumann.neumann_rows(
        phi_q,
        phi_k,
        problem.v,
        problem.discount,
        hops,
        problem.valid,
        num_chunks,
    )
    expected = reference.neumann_series(
        reference.row_chain(phi_q, phi_k, problem.valid),
        hide(problem.v, problem.valid),
        as_discount(problem.discount, problem.v),
        hops,
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    for a, b in zip(
        gradients(result, leaves), gradients(expected, leaves), strict=True
    ):
        assert_gradients_close(a, b)


def assert_gradients_close(a, b):
    """To 1e-8; None and zero mean the same."""
    if a is None or b is None:
        assert (a is None or not a.any()) and (b is None or not b.any())
    else:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@given(problems())
def test_chain_is_row_stochastic(problem):
    phi_q, phi_k = landmark_factors(problem)
    chain = reference.landmark_chain(phi_q, hide(phi_k, problem.valid))
    torch.testing.assert_close(
        chain.sum(-1), torch.ones_like(chain[..., 0]), rtol=0, atol=1e-12
    )


@given(problems(), st.booleans(), st.integers(1, 5))
def test_importance_equals_dense_pagerank(problem, one_hop, num_chunks):
    """PageRank over the whole image from M x M sums; 1e-10, float64."""
    phi_q, phi_k = landmark_factors(problem)
    state = merge_all(
        neumann.sum_chain(k, v, ok, q)
        for q, k, v, ok in chunk_tokens(
            num_chunks, phi_q, phi_k, problem.v, valid=problem.valid
        )
    )
    hops = 1 if one_hop else math.inf
    discount = None if one_hop else problem.discount
    result = neumann.importance(
        phi_k,
        neumann.chain_importance(state, discount, hops),
        state.count,
        discount,
        problem.valid,
    )
    chain = reference.landmark_chain(
        hide(phi_q, problem.valid), hide(phi_k, problem.valid)
    )
    if one_hop:
        expected = chain.sum(-2) / state.count[:, None, None]
    else:
        valid = problem.valid
        expected = pagerank(
            DenseGraph(chain),
            discount,
            None if valid is None else valid[:, None].expand(result.shape),
        )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        result.sum(-1), torch.ones_like(result[..., 0]), rtol=0, atol=1e-10
    )


def test_gradcheck():
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        x = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    q, k, v = (normal(1, 2, 5, 3) for _ in range(3))
    landmarks, log_tau = normal(2, 4, 3), normal(2)
    discount = torch.tensor([0.3, 0.8], dtype=torch.float64).requires_grad_()

    def landmark(q, k, v, landmarks, log_tau, discount, hops):
        tau = graphs.landmark_temperature(log_tau)
        return neumann.neumann_chain(
            graphs.landmark_queries(q, landmarks, tau),
            graphs.landmark_keys(k, landmarks, tau),
            v,
            discount,
            hops,
            num_chunks=2,
        )

    def crelu(q, k, v, discount, hops):
        return neumann.neumann_graph(
            graphs.crelu(q), graphs.crelu(k), v, discount, hops, num_chunks=2
        )

    for hops in (1, 3, math.inf):
        assert torch.autograd.gradcheck(
            lambda *args, h=hops: landmark(*args, h),
            (q, k, v, landmarks, log_tau, discount),
        )
        assert torch.autograd.gradcheck(
            lambda *args, h=hops: crelu(*args, h), (q, k, v, discount)
        )


def test_temperature_grows_with_log_extent():
    log_tau = torch.tensor([10.0]).log()
    ref = torch.tensor(256.0)
    tau = graphs.landmark_temperature(
        log_tau, torch.tensor([256.0, 65536.0]), ref
    ).flatten()
    torch.testing.assert_close(tau, torch.tensor([10.0, 20.0]))
    huge = graphs.landmark_temperature(
        torch.tensor([99.0]), torch.tensor([1e9]), torch.tensor(2.0)
    )
    assert huge.item() == graphs.MAX_TEMPERATURE


def test_one_hop_state_is_small():
    """With one hop the M x M sums are not kept."""
    phi, v = torch.rand(1, 2, 9, 4), torch.rand(1, 2, 9, 3)
    state = neumann.sum_chain(phi, v)
    assert state.key_query is None and state.query_mass is None
    with pytest.raises(ValueError, match='NeumannState: one part has'):
        state.merge(neumann.sum_chain(phi, v, phi_q=phi))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_factors_are_float32(dtype):
    x, landmarks = torch.randn(1, 2, 9, 8), torch.randn(2, 4, 8)
    x = x.to(dtype)
    tau = graphs.landmark_temperature(torch.zeros(2))
    phi_q = graphs.landmark_queries(x, landmarks.to(dtype), tau)
    phi_k = graphs.landmark_keys(x, landmarks.to(dtype), tau)
    assert phi_q.dtype == phi_k.dtype == torch.float32
    assert neumann.neumann_chain(phi_q, phi_k, x).dtype == dtype
    assert neumann.sum_chain(phi_k, x).key_value.dtype == torch.float32
