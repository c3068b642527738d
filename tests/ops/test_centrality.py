# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Float64 and a tolerance of 1e-10, unless a test says otherwise."""

import math

import networkx as nx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from infsa_seg.ops import centrality, graphs, neumann, reference
from infsa_seg.ops.centrality import DenseGraph, FactorGraph
from infsa_seg.ops.tokens import hide

from .strategies import problems
from .test_neumann import landmark_factors

hops_of = st.sampled_from([1, 2, 5, math.inf])
discounts = st.floats(0, 0.95)


def close(result, expected, atol=1e-10):
    expected = torch.as_tensor(expected, dtype=result.dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def uniform(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


@st.composite
def sparse(draw, *shape):
    """Weights in [0, 1), of which some, or all, are zero."""
    values = uniform(2, *shape, seed=draw(st.integers(0, 2**31)))
    return values[0] * (values[1] < draw(st.sampled_from([0.0, 0.3, 1.0])))


@st.composite
def matrices(draw, min_tokens=1):
    """One unbatched S, (N, N), with rows of zeros."""
    tokens = draw(st.integers(min_tokens, 9))
    matrix = draw(sparse(tokens, tokens))
    return matrix * (draw(sparse(tokens, 1)) > 0)


@st.composite
def factors(draw):
    """A factorised graph with masked tokens, possibly all of them."""
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    tokens, width = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    valid = draw(sparse(*batch, tokens, 1)) > 0
    phi_q = draw(sparse(*batch, tokens, width)) * valid
    return FactorGraph(phi_q, draw(sparse(*batch, tokens, width)) * valid)


def dense(graph):
    return DenseGraph(graph.phi_q @ graph.phi_k.mT)


def safe_alpha(graph):
    return 0.9 / (centrality.spectral_radius(graph) + 0.1)


def to_networkx(matrix):
    return nx.from_numpy_array(matrix.numpy(), create_using=nx.DiGraph)


@given(factors(), discounts, hops_of, st.integers(0, 2**31))
def test_factorised_equals_dense(graph, discount, hops, seed):
    """Also with the edges turned round."""
    b = uniform(*graph.phi_q.shape[:-1], 3, seed=seed)
    start, onward = b[..., 0], b[..., 1]
    for thin, full in ((graph, dense(graph)), (graph.T, dense(graph).T)):
        close(
            centrality.spectral_radius(thin), centrality.spectral_radius(full)
        )
        alpha = safe_alpha(full)
        for function, *args in (
            (centrality.neumann_series, b, alpha, hops),
            (centrality.katz, alpha),
            (centrality.fundamental_matrix, discount),
            (centrality.expected_visits, discount, start),
            (centrality.absorption, discount, start),
            (centrality.pagerank, discount),
            (centrality.pagerank, discount, start, onward),
        ):
            close(function(thin, *args), function(full, *args))


@given(st.integers(1, 9), hops_of, st.integers(0, 2**31))
def test_neumann_series_adds_up_powers(tokens, hops, seed):
    """Of a signed matrix; the closed form against scipy's solve."""
    matrix, b = uniform(2, tokens, tokens, seed=seed) - 0.5
    alpha = safe_alpha(DenseGraph(matrix)).item()
    result = centrality.neumann_series(DenseGraph(matrix), b, alpha, hops)
    if hops == math.inf:
        solved = scipy.linalg.solve(np.eye(tokens) - alpha * matrix.numpy(), b)
        close(result, solved - b.numpy())
    else:
        powers = (
            torch.linalg.matrix_power(alpha * matrix, t) @ b
            for t in range(1, hops + 1)
        )
        close(result, sum(powers))


@given(factors())
def test_katz_is_the_series_of_ones(graph):
    """So it counts discounted walks of one or more steps."""
    alpha = safe_alpha(graph)
    ones = torch.ones_like(graph.phi_q[..., :1])
    close(
        centrality.katz(graph, alpha)[..., None],
        centrality.neumann_series(graph, ones, alpha),
    )
    # alpha rho <= 0.9, and 0.9^400 < 1e-18.
    close(
        centrality.katz(graph, alpha)[..., None],
        centrality.neumann_series(graph, ones, alpha, hops=400),
    )


@given(matrices(min_tokens=2))  # its own takes no less
def test_katz_equals_networkx(matrix):
    """Networkx counts arriving walks, the one without a step included."""
    graph = DenseGraph(matrix)
    alpha = safe_alpha(graph).item()
    expected = nx.katz_centrality_numpy(
        to_networkx(matrix), alpha, normalized=False, weight='weight'
    )
    close(1 + centrality.katz(graph.T, alpha), list(expected.values()))


@pytest.mark.parametrize('personal', [False, True])
@pytest.mark.parametrize('onward', [False, True])
@given(matrices(), discounts, st.data())
def test_pagerank_equals_networkx(personal, onward, matrix, discount, data):
    """Dangling tokens included."""

    def weights():
        x = data.draw(sparse(len(matrix)))
        x[data.draw(st.integers(0, len(matrix) - 1))] = 1
        return x

    def as_dict(x):
        return None if x is None else dict(enumerate(x.tolist()))

    personalization = weights() if personal else None
    dangling = weights() if onward else None
    expected = nx.pagerank(
        to_networkx(matrix),
        discount,
        as_dict(personalization),
        dangling=as_dict(dangling),
        max_iter=2000,
        tol=1e-14,
    )
    result = centrality.pagerank(
        DenseGraph(matrix), discount, personalization, dangling
    )
    close(result, list(expected.values()))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**31))
def test_eigenvector_of_positive_factors(tokens, width, seed):
    """Left and right, dense and factorised, against scipy; error 1e-9."""
    graph = FactorGraph(*(uniform(2, tokens, width, seed=seed) + 0.05))
    values, left, right = scipy.linalg.eig(dense(graph).matrix, left=True)
    top = np.argmax(values.real)
    for form in (graph, dense(graph)):
        for turned, vectors in ((form, right), (form.T, left)):
            expected = np.abs(vectors[:, top].real)
            close(centrality.eigenvector(turned), expected, atol=1e-9)


@given(matrices(min_tokens=3), st.integers(0, 2**31))
def test_eigenvector_equals_networkx(matrix, seed):
    """Strongly connected by a ring, and periodic where nothing else is.

    Networkx has that of received weights; error 1e-8.
    """
    ring = (0.5 + uniform(len(matrix), seed=seed)).diag().roll(1, 0)
    matrix = matrix + ring
    expected = nx.eigenvector_centrality_numpy(
        to_networkx(matrix), weight='weight', tol=1e-14
    )
    result = centrality.eigenvector(DenseGraph(matrix).T)
    close(result, list(expected.values()), atol=1e-8)


def test_eigenvector_of_equal_parts_is_the_limit_of_katz():
    """Two components of the same strength: shares as from a start of ones."""
    part = uniform(3, 3)
    parts = torch.block_diag(part, part.roll(1, 0).roll(1, 1))
    graph = DenseGraph(parts)
    alpha = centrality.max_discount(graph, 1e-9)
    limit = F.normalize(centrality.katz(graph, alpha), dim=-1)
    close(centrality.eigenvector(graph), limit, atol=1e-7)


def test_eigenvector_of_a_batch_with_an_image_without_edges():
    phi_q, phi_k = uniform(2, 2, 5, 3)
    phi_q[1], phi_k[1] = 0, 0
    graph = FactorGraph(phi_q, phi_k)
    for form in (graph, dense(graph)):
        result = centrality.eigenvector(form)
        assert (result[1] == 0).all()
        alone = FactorGraph(phi_q[0], phi_k[0])
        close(result[0], centrality.eigenvector(alone))


@given(st.integers(2, 9), st.integers(0, 2**31))
def test_katz_turns_to_the_eigenvector(tokens, seed):
    """The distance falls in proportion to margin = 1 - alpha rho.

    Katz is ``sum_i alpha l_i / (1 - alpha l_i) c_i v_i``, where the dominant
    term alone grows as 1 / margin.
    """
    graph = DenseGraph(uniform(tokens, tokens, seed=seed) + 0.05)
    limit = centrality.eigenvector(graph)

    def distance(margin):
        alpha = centrality.max_discount(graph, margin)
        katz = F.normalize(centrality.katz(graph, alpha), dim=-1)
        return (katz - limit).norm().item()

    assert distance(1e-3) < 1e-2
    assert distance(1e-5) == pytest.approx(
        distance(1e-3) / 100, rel=0.05, abs=1e-9
    )


@given(st.integers(0, 9), st.integers(0, 2**31), st.sampled_from([0.0, 0.5]))
def test_spectral_radius_equals_scipy(tokens, seed, shift):
    """Signed or not; that of an empty graph is zero."""
    matrix = uniform(2, tokens, tokens, seed=seed) - shift
    expected = [max(abs(scipy.linalg.eigvals(x)), default=0) for x in matrix]
    graph = DenseGraph(matrix)
    close(centrality.spectral_radius(graph), expected)
    if tokens:
        close(centrality.max_discount(graph, 0.2), 0.8 / np.array(expected))


@given(matrices(), discounts, st.data())
def test_visits_equal_scipy(matrix, discount, data):
    """The fundamental matrix, and its rows by a sparse solve."""
    tokens = len(matrix)
    walk = torch.nan_to_num(matrix / matrix.sum(-1, keepdim=True)).numpy()
    system = np.eye(tokens) - discount * walk
    graph = DenseGraph(matrix)
    fundamental = centrality.fundamental_matrix(graph, discount)
    close(fundamental, scipy.linalg.inv(system))
    start = data.draw(sparse(tokens))
    visits = centrality.expected_visits(graph, discount, start)
    close(
        visits,
        scipy.sparse.linalg.spsolve(
            scipy.sparse.csc_array(system.T), start.numpy()
        ),
    )
    one_hot = torch.eye(tokens, dtype=torch.float64)
    for i in range(tokens):
        close(
            centrality.expected_visits(graph, discount, one_hot[i]),
            fundamental[i],
        )
    # Only a walk that cannot get stuck takes 1 / (1 - discount) steps.
    if (matrix.sum(-1) > 0).all():
        close(
            (1 - discount) * fundamental.sum(-1), torch.ones(tokens).double()
        )


def test_visits_and_ends_of_walks_that_are_walked():
    """20,000 seeded walks; 5 standard errors, token 3 has no way out."""
    matrix = uniform(4, 4) + 0.1
    matrix[3] = 0
    discount, walks = 0.8, 20_000
    graph = DenseGraph(matrix)
    transition = centrality.transition(graph).matrix
    generator = torch.Generator().manual_seed(0)
    visits = torch.zeros(walks, 4, dtype=torch.float64)
    ends = torch.zeros(walks, 4, dtype=torch.float64)
    at = torch.zeros(walks, dtype=torch.long)
    alive = torch.ones(walks, dtype=torch.bool)
    while alive.any():
        visits[alive, at[alive]] += 1
        lives_on = torch.rand(walks, generator=generator) < discount
        lives_on &= alive & (at != 3)
        ended = alive & ~lives_on
        ends[ended, at[ended]] = 1
        steps = transition[at[lives_on]]
        if len(steps):
            at[lives_on] = torch.multinomial(
                steps, 1, generator=generator
            ).squeeze(-1)
        alive = lives_on
    start = torch.tensor([1, 0, 0, 0])
    for walked, expected in (
        (visits, centrality.expected_visits(graph, discount, start)),
        (ends, centrality.absorption(graph, discount, start)),
    ):
        error = walked.std(0) / math.sqrt(walks)
        assert ((walked.mean(0) - expected).abs() <= 5 * error).all()


@given(factors(), discounts, st.integers(0, 2**31))
def test_every_walk_ends_somewhere(graph, discount, seed):
    start = uniform(*graph.phi_q.shape[:-1], seed=seed)
    ends = centrality.absorption(graph, discount, start)
    assert (ends >= 0).all()
    close(ends.sum(-1), start.sum(-1))


@given(matrices(), discounts, st.data())
def test_pagerank_is_where_a_walk_ends(matrix, discount, data):
    """On the normalised graph, with a restart where a walk starts."""
    start = data.draw(sparse(len(matrix))) + 0.01
    graph = DenseGraph(matrix + 0.01)
    rank = centrality.pagerank(graph, discount, start)
    close(rank, centrality.absorption(graph, discount, start / start.sum()))
    # It is its own fixed point, step by step.
    walk = centrality.transition(graph).matrix
    close(discount * rank @ walk + (1 - discount) * start / start.sum(), rank)


@given(problems())
def test_pagerank_of_a_landmark_chain_is_its_importance(problem):
    """Against the M x M sums and the dense chain; masked tokens get none."""
    discount, valid = problem.discount, problem.valid
    phi_q, phi_k = (hide(phi, valid) for phi in landmark_factors(problem))
    state = neumann.sum_chain(phi_k, problem.v, valid, phi_q)
    weights = neumann.chain_importance(state, discount, math.inf)
    graph = FactorGraph(phi_q, phi_k / phi_k.sum(-2, keepdim=True))
    restart = None if valid is None else valid[:, None]
    rank = centrality.pagerank(graph, discount, restart)
    close(
        rank,
        neumann.importance(phi_k, weights, state.count, discount, valid),
    )
    chain = DenseGraph(reference.landmark_chain(phi_q, phi_k))
    close(rank, centrality.pagerank(chain, discount, restart))


@given(problems())
def test_pagerank_of_a_feature_graph_is_its_importance(problem):
    """Row normalisation, with tokens that have no edge."""
    discount, valid = problem.discount, problem.valid
    phi_q, phi_k = graphs.relu(problem.q), graphs.relu(problem.k)
    keys = neumann.with_teleport(phi_k)
    state = neumann.sum_rows(keys, problem.v, valid)
    rows = neumann.row_queries(phi_q, state.key_mass)
    weights = neumann.row_importance(
        neumann.sum_walk(rows, keys, valid), discount, math.inf
    )
    graph = FactorGraph(hide(phi_q, valid), hide(phi_k, valid))
    restart = None if valid is None else valid[:, None]
    close(
        centrality.pagerank(graph, discount, restart),
        neumann.importance(keys, weights, state.count, discount, valid),
    )


def test_a_batch_as_large_as_the_graph():
    """As many graphs as tokens as columns: none is taken for another."""
    matrix, b = uniform(3, 3, 3), uniform(3, 3, seed=1)
    together = centrality.fundamental_matrix(DenseGraph(matrix), 0.5)
    series = centrality.neumann_series(DenseGraph(matrix), b, 0.2)
    for i in range(3):
        alone = DenseGraph(matrix[i])
        close(together[i], centrality.fundamental_matrix(alone, 0.5))
        close(series[i], centrality.neumann_series(alone, b, 0.2))


def test_pagerank_of_an_image_without_a_valid_token_is_zero():
    phi = uniform(2, 3, 2)
    phi[1] = 0
    rank = centrality.pagerank(FactorGraph(phi, phi), 0.5, phi.sum(-1) > 0)
    close(rank.sum(-1), [1, 0])


def test_a_row_too_small_to_divide_is_a_dead_end():
    """Its reciprocal would overflow; 1e-6, float32."""
    matrix = uniform(3, 3).float()
    tiny, zero = matrix.clone(), matrix.clone()
    tiny[1], zero[1] = 1e-40, 0
    start = torch.ones(3)
    for graph in (DenseGraph(tiny), FactorGraph(tiny, torch.eye(3))):
        for function in (centrality.absorption, centrality.pagerank):
            close(
                function(graph, 0.5, start),
                function(DenseGraph(zero), 0.5, start),
                atol=1e-6,
            )


def test_a_discount_for_each_head():
    phi_q, phi_k = uniform(2, 2, 3, 5, 2)
    graph = FactorGraph(phi_q, phi_k)
    discount = torch.tensor([0.1, 0.5, 0.9])
    start = uniform(5)
    for function, *args in (
        (centrality.expected_visits, start),
        (centrality.absorption, start),
        (centrality.pagerank, start),
        (centrality.fundamental_matrix,),
    ):
        result = function(graph, discount, *args)
        for head, gamma in enumerate(discount.tolist()):
            alone = FactorGraph(phi_q[:, head], phi_k[:, head])
            # The discounts are float32.
            close(result[:, head], function(alone, gamma, *args), atol=1e-6)


def test_nothing_is_as_large_as_the_graph():
    """200,000 tokens, whose matrix would take 149 GiB; 1e-4, float32."""
    tokens = 200_000
    phi_q, phi_k = uniform(2, tokens, 4).float()
    graph = FactorGraph(phi_q, phi_k)
    rank = centrality.pagerank(graph, 0.85)
    walk = centrality.transition(graph).T
    step = 0.85 * walk.apply(rank[:, None]) + 0.15 / tokens
    torch.testing.assert_close(step.squeeze(-1), rank, rtol=1e-4, atol=0)
    alpha = centrality.max_discount(graph)
    katz = centrality.katz(graph, alpha)[:, None]
    torch.testing.assert_close(
        alpha * graph.apply(katz + 1), katz, rtol=1e-4, atol=0
    )
    vector = centrality.eigenvector(graph)[:, None]
    torch.testing.assert_close(
        graph.apply(vector),
        centrality.spectral_radius(graph) * vector,
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.int64])
def test_at_least_float32(dtype):
    matrix = (4 * uniform(3, 3)).to(dtype)
    start = torch.ones(3, dtype=dtype)
    for graph in (DenseGraph(matrix), FactorGraph(matrix, matrix)):
        for result in (
            centrality.katz(graph, 0.01),
            centrality.eigenvector(graph),
            centrality.expected_visits(graph, 0.5, start),
            centrality.pagerank(graph, 0.5, start),
        ):
            assert result.dtype == torch.float32


def test_gradcheck():
    """Factors, matrix, b and discount; the solves and the radius."""
    phi_q, phi_k = (x.requires_grad_() for x in uniform(2, 2, 3, 2) + 0.1)
    matrix = (uniform(2, 3, 3, seed=1) + 0.1).requires_grad_()
    discount = torch.tensor([0.3, 0.8]).double().requires_grad_()
    b = uniform(2, 3, 2, seed=2).requires_grad_()

    def all_of(graph, discount, b):
        alpha = discount * centrality.max_discount(graph)
        start = b[..., 0]
        return (
            centrality.neumann_series(graph, b, alpha),
            centrality.neumann_series(graph, b, alpha, 3),
            centrality.katz(graph, alpha),
            centrality.fundamental_matrix(graph, discount),
            centrality.absorption(graph, discount, start),
            centrality.pagerank(graph, discount, start, b[..., 1]),
            centrality.spectral_radius(graph),
        )

    assert torch.autograd.gradcheck(
        lambda q, k, *args: all_of(FactorGraph(q, k), *args),
        (phi_q, phi_k, discount, b),
    )
    assert torch.autograd.gradcheck(
        lambda matrix, *args: all_of(DenseGraph(matrix), *args),
        (matrix, discount, b),
    )


def ring(tokens=3):
    return DenseGraph(torch.eye(tokens).roll(1, 0))


@pytest.mark.parametrize('margin', [0.0, -0.5])
def test_a_series_that_diverges_is_refused(margin):
    """At 1 / rho already, and if one graph of a batch does."""
    for graph in (ring(), DenseGraph(uniform(4, 4) - 0.5)):
        alpha = (1 - margin) / centrality.spectral_radius(graph)
        with pytest.raises(ValueError, match=r'alpha \* rho\(S\) is 1'):
            centrality.katz(graph, alpha)
        with pytest.raises(ValueError, match='max_discount'):
            centrality.katz(graph, -alpha)
        with pytest.raises(ValueError, match='diverges'):
            centrality.katz(graph, torch.stack([alpha / 2, alpha]))
        centrality.katz(graph, alpha * (1 + margin) * 0.999)


@pytest.mark.parametrize('margin', [-0.1, 1.0, math.nan])
def test_a_margin_outside_is_refused(margin):
    with pytest.raises(ValueError, match=r'margin must be in \[0, 1\)'):
        centrality.max_discount(ring(), margin)


@pytest.mark.parametrize('discount', [-0.1, 1.0, torch.tensor([0.5, 1.0])])
def test_a_discount_outside_is_refused(discount):
    for function, *args in (
        (centrality.pagerank,),
        (centrality.fundamental_matrix,),
        (centrality.expected_visits, torch.ones(3)),
        (centrality.absorption, torch.ones(3)),
    ):
        with pytest.raises(ValueError, match=r'must be in \[0, 1\)'):
            function(ring(), discount, *args)


def test_negative_weights_are_refused_where_a_walk_needs_none():
    signed = torch.tensor([[1.0, -0.1], [1.0, 1.0]])
    positive = signed.abs()
    for graph in (
        DenseGraph(signed),
        FactorGraph(signed, positive),
        FactorGraph(positive, signed),
    ):
        for walk in (
            centrality.eigenvector,
            centrality.transition,
            centrality.pagerank,
        ):
            with pytest.raises(ValueError, match='negative'):
                walk(graph)
    for weights in ((signed[0], None), (None, signed[0])):
        with pytest.raises(ValueError, match='has negative entries'):
            centrality.pagerank(DenseGraph(positive), 0.5, *weights)


def test_an_iteration_that_does_not_settle_says_so():
    two_parts = DenseGraph(torch.tensor([[1.0, 0.0], [1.0, 0.9999]]))
    with pytest.raises(ValueError, match='within 10 steps'):
        centrality.eigenvector(two_parts, max_steps=10)
    acyclic = DenseGraph(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match='no cycle'):
        centrality.eigenvector(acyclic, max_steps=100)


def test_wrong_shapes_are_refused():
    for shape in ((3,), (3, 4)):
        with pytest.raises(ValueError, match=r'S must be \(..., N, N\)'):
            DenseGraph(torch.ones(shape))
    for shapes in (((3,), (3,)), ((3, 2), (3, 1)), ((3, 2), (2, 2))):
        with pytest.raises(ValueError, match='phi_q and phi_k must both be'):
            FactorGraph(*(torch.ones(shape) for shape in shapes))
    for b in (torch.ones(3), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r'b must be .* N = 3, got'):
            centrality.neumann_series(ring(), b, 0.5)
    for hops in (0, 1.5, -1):
        with pytest.raises(ValueError, match='no positive integer'):
            centrality.neumann_series(ring(), torch.ones(3, 1), 0.5, hops)
    for wrong in (torch.ones(2), torch.ones(())):
        with pytest.raises(ValueError, match=r'start must be .* N = 3, got'):
            centrality.expected_visits(ring(), 0.5, wrong)
        with pytest.raises(ValueError, match='dangling must be'):
            centrality.pagerank(ring(), 0.5, None, wrong)
