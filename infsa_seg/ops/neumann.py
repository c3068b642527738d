# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Neumann InfSA: diffusion over a factorised graph, exact and O(N M).

Everything about the N x N graph S = phi_q phi_k^T is available from sums of
size M x M (DESIGN 3.3). Three kinds of graph, by what divides them:

* *chain*, landmarks: the columns of phi_k are divided by their sums
  (``sum_chain``, ``read_chain``), one phase;
* *rows*, feature maps: each row of S is divided by its sum, again a Markov
  chain (``sum_rows``, ``row_queries``, ``sum_walk``, ``read_rows``), one phase
  for one hop and two for more;
* *graph*, feature maps: S is divided by its Frobenius norm (``sum_graph``,
  ``read_graph``), one phase.

Shapes: B batch, H heads, N tokens, D width per head, M width of the factors.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .solve import solve
from .state import State, merge_all
from .tokens import (
    EPS,
    as_discount,
    chunk_tokens,
    count_tokens,
    hide,
    sum_products,
)


@dataclasses.dataclass
class NeumannState(State):
    """Sums of products of the factors; None where nothing asks for them.

    Attributes:
        key_value: (B, H, M, D), phi_k^T v.
        count: (B,), number of valid tokens.
        key_mass: (B, H, M), sum of phi_k.
        query_mass: (B, H, M), sum of phi_q (for the importance map).
        key_query: (B, H, M, M), phi_k^T phi_q (more hops than one).
        query_query: (B, H, M, M), phi_q^T phi_q (Frobenius norm).
        key_key: (B, H, M, M), phi_k^T phi_k (Frobenius norm).
        plain: (B, H, D), sum of v (for heads without any edge).
    """

    key_value: Tensor
    count: Tensor
    key_mass: Tensor | None = None
    query_mass: Tensor | None = None
    key_query: Tensor | None = None
    query_query: Tensor | None = None
    key_key: Tensor | None = None
    plain: Tensor | None = None


@dataclasses.dataclass
class WalkState(State):
    """Second phase of a row-normalised graph; its phi_q needs the first.

    Attributes:
        query_mass: (B, H, M), sum of phi_q.
        key_query: (B, H, M, M), phi_k^T phi_q (more hops than one).
    """

    query_mass: Tensor
    key_query: Tensor | None = None


def sum_chain(
    phi_k: Tensor,
    v: Tensor,
    valid: Tensor | None = None,
    phi_q: Tensor | None = None,
    hops: float = math.inf,
    query_valid: Tensor | None = None,
) -> NeumannState:
    """Sums of a landmark graph over some tokens.

    Args:
        phi_k: (B, H, N, M), not normalised.
        v: (B, H, N, D).
        valid: (B, N) bool; invalid tokens enter with weight zero.
        phi_q: (B, H, N, M), needed with more hops than one and for the
            importance map; None leaves its sums out.
        hops: one hop leaves ``key_query`` out.
        query_valid: (B, L) bool, where the queries are L other tokens; None
            for the same.
    """
    phi_k, v = hide(phi_k, valid), hide(v, valid).to(phi_k.dtype)
    state = NeumannState(
        key_value=sum_products(phi_k, v),
        count=count_tokens(phi_k, valid),
        key_mass=phi_k.sum(-2),
    )
    if phi_q is not None:
        phi_q = hide(phi_q, valid if query_valid is None else query_valid)
        state.query_mass = phi_q.sum(-2)
        if hops != 1:
            state.key_query = sum_products(phi_k, phi_q)
    return state


def read_chain(
    state: NeumannState, discount: Tensor | float | None, hops: float
) -> Tensor:
    """Finish a landmark graph: the value that waits at each landmark.

    With P the chain over tokens and L the same chain between landmarks,
    ``sum_t w_t P^t v = phi_q (sum_t w_t L^(t-1)) phi_k^T v``, where
    ``w_t = g^(t-1)``, scaled to sum to one.

    Args:
        state: sums of the whole image.
        discount: g, scalar or (H,); None with one hop, which has no use for
            it.
        hops: a positive integer or ``math.inf``.

    Returns:
        (B, H, M, D); a token's output is phi_q times this.
    """
    value = state.key_value / _landmark_mass(state)
    if hops == 1:
        return value
    return _walk_on(landmark_walk(state), value, discount, hops)


def landmark_walk(state: NeumannState) -> Tensor:
    """L = phi_k^T phi_q, the chain seen from the landmarks, (B, H, M, M)."""
    assert state.key_query is not None
    return state.key_query / _landmark_mass(state)


def with_teleport(phi_k: Tensor) -> Tensor:
    """Append a column of ones, by which any token can be reached, M + 1."""
    return torch.cat([phi_k, torch.ones_like(phi_k[..., :1])], -1)


def sum_rows(
    phi_k: Tensor, v: Tensor, valid: Tensor | None = None
) -> NeumannState:
    """First phase of a row-normalised graph; arguments as above.

    Args:
        phi_k: (B, H, N, M + 1), of :func:`with_teleport`.
        v: (B, H, N, D).
        valid: (B, N) bool.
    """
    return sum_chain(phi_k, v, valid)


def row_queries(phi_q: Tensor, key_mass: Tensor) -> Tensor:
    """Divide each token's row of S by its sum, (B, H, N, M + 1).

    A token without any edge walks to all tokens alike (the rule of PageRank
    for dangling nodes), through the column of :func:`with_teleport`.

    Args:
        phi_q: (B, H, N, M), non-negative.
        key_mass: (B, H, M + 1), of the first phase, whole image.
    """
    degree = phi_q @ key_mass[..., :-1, None]
    dangling = degree < torch.finfo(degree.dtype).tiny
    rows = phi_q / torch.where(dangling, torch.ones_like(degree), degree)
    count = key_mass[..., None, -1:].clamp_min(1)
    # Masked, not multiplied: a row too small to divide has no edge.
    return torch.cat(
        [rows.masked_fill(dangling, 0), dangling.to(rows.dtype) / count], -1
    )


def sum_walk(
    rows: Tensor,
    phi_k: Tensor,
    valid: Tensor | None = None,
    hops: float = math.inf,
    query_valid: Tensor | None = None,
) -> WalkState:
    """Second phase of a row-normalised graph over some tokens.

    Args:
        rows: (B, H, N, M + 1), of :func:`row_queries`.
        phi_k: (B, H, N, M + 1), of :func:`with_teleport`.
        valid, hops, query_valid: as for :func:`sum_chain`.
    """
    rows = hide(rows, valid if query_valid is None else query_valid)
    state = WalkState(query_mass=rows.sum(-2))
    if hops != 1:
        state.key_query = sum_products(hide(phi_k, valid), rows)
    return state


def read_rows(
    key_value: Tensor,
    walk: WalkState | None,
    discount: Tensor | float | None,
    hops: float,
) -> Tensor:
    """Finish a row-normalised graph, (B, H, M + 1, D).

    Args:
        key_value: of the first phase, whole image.
        walk: the second phase, whole image; None with one hop.
        discount, hops: as for :func:`read_chain`.
    """
    if hops == 1:
        return key_value
    assert walk is not None and walk.key_query is not None
    return _walk_on(walk.key_query, key_value, discount, hops)


def sum_graph(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    valid: Tensor | None = None,
    hops: float = math.inf,
    query_valid: Tensor | None = None,
) -> NeumannState:
    """Sums of a graph under the Frobenius norm.

    Args:
        phi_q, phi_k: (B, H, N, M).
        v: (B, H, N, D).
        valid, hops, query_valid: as for :func:`sum_chain`.
    """
    phi_q = hide(phi_q, valid if query_valid is None else query_valid)
    phi_k = hide(phi_k, valid)
    v = hide(v, valid).to(phi_k.dtype)
    return NeumannState(
        key_value=sum_products(phi_k, v),
        count=count_tokens(phi_k, valid),
        key_mass=phi_k.sum(-2),
        query_mass=phi_q.sum(-2),
        key_query=sum_products(phi_k, phi_q) if hops != 1 else None,
        query_query=sum_products(phi_q, phi_q),
        key_key=sum_products(phi_k, phi_k),
        plain=v.sum(-2),
    )


def read_graph(
    state: NeumannState, discount: Tensor | float, hops: float
) -> tuple[Tensor, Tensor]:
    """Finish a graph under the Frobenius norm (Woodbury).

    ``sum_{t=1..T} (g S)^t v = phi_q g (sum_{t<T} (g M)^t) phi_k^T v`` with
    ``M = phi_k^T phi_q`` and ``g = discount / (|S| + eps)``.

    Args:
        state: sums of the whole image.
        discount, hops: as for :func:`read_chain`.

    Returns:
        The readout (B, H, M, D) and what every token receives besides,
        (B, H, 1, D): zero, but for a head without any edge, which falls back
        to the graph that joins all tokens alike.
    """
    assert state.plain is not None
    gain = graph_gain(state, discount)
    readout = gain * _series(state.key_query, gain, state.key_value, hops)
    gamma = as_discount(discount, readout)
    mean = state.plain / state.count[:, None, None].clamp_min(1)
    fallback = geometric_sum(gamma, hops) * mean[..., None, :]
    dead = dead_graphs(state)[..., None, None]
    return readout, fallback.where(dead, torch.zeros_like(fallback))


def graph_gain(state: NeumannState, discount: Tensor | float) -> Tensor:
    """``discount / (|S|_F + eps)``, (B, H, 1, 1); zero without any edge."""
    assert state.query_query is not None and state.key_key is not None
    # The peaks keep the product in range; they cancel out.
    peaks = [
        gram.detach().amax((-2, -1), keepdim=True)
        for gram in (state.query_query, state.key_key)
    ]
    tiny = torch.finfo(peaks[0].dtype).tiny
    queries, keys = (peak.clamp_min(tiny) for peak in peaks)
    product = (state.query_query / queries) * (state.key_key / keys)
    # The floor keeps the gradient of the root finite for an empty graph.
    root = product.sum((-2, -1), keepdim=True).clamp_min(tiny).sqrt()
    norm = root * queries.sqrt() * keys.sqrt()
    gain = as_discount(discount, norm) / (norm + EPS)
    return gain.masked_fill(dead_graphs(state)[..., None, None], 0)


def dead_graphs(state: NeumannState) -> Tensor:
    """(B, H) bool: no token of the image has an edge to any other."""
    assert state.query_query is not None and state.key_key is not None
    queries, keys = (
        gram.diagonal(dim1=-2, dim2=-1) > 0
        for gram in (state.query_query, state.key_key)
    )
    return ~(queries & keys).any(-1) & (state.count > 0)[:, None]


def attend(
    phi_q: Tensor, readout: Tensor, fallback: Tensor | None = None
) -> Tensor:
    """Each token's own output, phi_q times the readout, (B, H, N, D)."""
    out = phi_q @ readout
    return out if fallback is None else out + fallback


def chain_importance(
    state: NeumannState, discount: Tensor | float | None, hops: float
) -> Tensor:
    """Finish the importance map of a landmark graph, (B, H, M).

    Args:
        state: sums with ``query_mass`` and ``key_query`` (give ``phi_q`` to
            :func:`sum_chain`).
        discount, hops: as for :func:`read_chain`.

    Returns:
        Weights for :func:`importance`.
    """
    assert state.query_mass is not None
    walk = landmark_walk(state) if hops != 1 else None
    weights = _visits(state.query_mass, walk, discount)
    return weights / _landmark_mass(state).squeeze(-1)


def row_importance(
    walk: WalkState, discount: Tensor | float | None, hops: float
) -> Tensor:
    """Finish the importance map of a row-normalised graph, (B, H, M + 1)."""
    return _visits(walk.query_mass, walk.key_query, discount)


def importance(
    phi_k: Tensor,
    weights: Tensor,
    count: Tensor,
    discount: Tensor | float | None,
    valid: Tensor | None = None,
) -> Tensor:
    """How much of the walk each token receives, (B, H, N); sums to one.

    With a discount this is PageRank,
    ``(1 - g) / N (1 + g (1^T phi_q) (I - g L)^-1 phi_k[j]^T)``; without (one
    hop) the mean attention that a token receives, ``1^T P / N``.

    Args:
        phi_k: (B, H, N, M), not normalised.
        weights: of :func:`chain_importance` or :func:`row_importance`.
        count: (B,) valid tokens of the whole image.
        discount: None with one hop.
        valid: (B, N) bool.
    """
    received = phi_k @ weights[..., None]
    if discount is not None:
        gamma = as_discount(discount, received)
        received = (1 - gamma) * (1 + gamma * received)
    received = hide(received, valid).squeeze(-1)
    return received / count[:, None, None].clamp_min(1)


def graph_importance(
    state: NeumannState, discount: Tensor | float, hops: float
) -> tuple[Tensor, Tensor]:
    """Finish the importance map under the Frobenius norm.

    What a token receives over all hops, ``1^T sum_{t=1..T} (g S)^t``: Katz
    centrality, scaled to sum to one.

    Returns:
        Weights (B, H, M) and what every token receives besides, (B, H, 1);
        the importance of a token is ``phi_k . weights`` plus the latter.
    """
    assert state.query_mass is not None and state.key_mass is not None
    walk = None if state.key_query is None else state.key_query.mT
    mass = state.query_mass[..., None]
    weights = _series(walk, graph_gain(state, discount), mass, hops)
    weights = weights.squeeze(-1)
    total = (weights * state.key_mass).sum(-1, keepdim=True)
    dead = dead_graphs(state)[..., None] | (total <= 0)
    weights = weights / torch.where(dead, torch.ones_like(total), total)
    uniform = 1 / state.count[:, None, None].clamp_min(1)
    return (
        weights.masked_fill(dead, 0),
        uniform.where(dead, torch.zeros_like(uniform)),
    )


def geometric_sum(ratio: Tensor, hops: float) -> Tensor:
    """``sum_{t=1..T} ratio^t`` for a ratio in (0, 1), T up to infinity."""
    total = ratio / (1 - ratio)
    return total if math.isinf(hops) else total * (1 - ratio**hops)


def _landmark_mass(state: NeumannState) -> Tensor:
    """(B, H, M, 1), one where there are no tokens."""
    assert state.key_mass is not None
    mass = state.key_mass
    return torch.where(mass > 0, mass, torch.ones_like(mass))[..., None]


def _walk_on(
    walk: Tensor, value: Tensor, discount: Tensor | float | None, hops: float
) -> Tensor:
    """``sum_{t=1..T} w_t L^(t-1) value`` with ``w_t ~ g^(t-1)``, sum one."""
    assert discount is not None
    gamma = as_discount(discount, value)
    total = _series(walk, gamma, value, hops)
    return total * gamma / geometric_sum(gamma, hops)


def _visits(
    mass: Tensor, walk: Tensor | None, discount: Tensor | float | None
) -> Tensor:
    """``mass (I - g L)^-1``, or ``mass`` itself without a walk, (B, H, M)."""
    if walk is None:
        return mass
    assert discount is not None
    gamma = as_discount(discount, mass[..., None])
    visits = _series(walk.mT, gamma, mass[..., None], math.inf)
    return visits.squeeze(-1)


def _series(
    walk: Tensor | None, gain: Tensor, value: Tensor, hops: float
) -> Tensor:
    """``sum_{t<T} (gain walk)^t value``, by a solve for infinitely many."""
    if hops == 1:
        return value
    assert walk is not None
    matrix = gain * walk
    if math.isinf(hops):
        eye = torch.eye(
            matrix.shape[-1], dtype=matrix.dtype, device=matrix.device
        )
        return solve(eye - matrix, value)
    total = value
    for _ in range(int(hops) - 1):
        total = value + matrix @ total
    return total


def neumann_chain(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    discount: Tensor | float | None = None,
    hops: float = 1,
    valid: Tensor | None = None,
    num_chunks: int = 1,
) -> Tensor:
    """Diffusion over a landmark graph of projected tokens, by chunks.

    Args:
        phi_q, phi_k: (B, H, N, M), of :mod:`infsa_seg.ops.graphs`.
        v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,); None with one hop.
        hops: a positive integer or ``math.inf``.
        valid: (B, N) bool, or None for all.
        num_chunks: how many parts the tokens are summed in.

    Returns:
        (B, H, N, D) in the dtype of ``v``, zero where invalid.
    """
    state = merge_all(
        sum_chain(k, value, ok, None if hops == 1 else q)
        for q, k, value, ok in chunk_tokens(
            num_chunks, phi_q, phi_k, v, valid=valid
        )
    )
    readout = read_chain(state, discount, hops)
    return hide(attend(phi_q, readout).to(v.dtype), valid)


def neumann_rows(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    discount: Tensor | float | None = None,
    hops: float = 1,
    valid: Tensor | None = None,
    num_chunks: int = 1,
) -> Tensor:
    """Diffusion over a row-normalised graph; as :func:`neumann_chain`."""
    phi_k = with_teleport(phi_k)
    chunks = chunk_tokens(num_chunks, phi_q, phi_k, v, valid=valid)
    state = merge_all(sum_rows(k, value, ok) for _, k, value, ok in chunks)
    assert state.key_mass is not None
    key_mass = state.key_mass
    walk = None
    if hops != 1:
        walk = merge_all(
            sum_walk(row_queries(q, key_mass), k, ok) for q, k, _, ok in chunks
        )
    readout = read_rows(state.key_value, walk, discount, hops)
    rows = row_queries(phi_q, key_mass)
    return hide(attend(rows, readout).to(v.dtype), valid)


def neumann_graph(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    hops: float = 1,
    valid: Tensor | None = None,
    num_chunks: int = 1,
) -> Tensor:
    """Diffusion under the Frobenius norm; as :func:`neumann_chain`."""
    state = merge_all(
        sum_graph(q, k, value, ok, hops)
        for q, k, value, ok in chunk_tokens(
            num_chunks, phi_q, phi_k, v, valid=valid
        )
    )
    readout, fallback = read_graph(state, discount, hops)
    return hide(attend(phi_q, readout, fallback).to(v.dtype), valid)
