# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Neumann InfSA: diffusion over a factorised graph, exact and O(N M).

Everything about the N x N graph S = phi_q phi_k^T is available from sums of
size M x M (DESIGN 3.3), in one phase. Shapes: B batch, H heads, N tokens, D
width per head, M width of the factors.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .state import State, merge_all
from .tokens import EPS, as_discount, chunk_tokens, count_tokens, hide


@dataclasses.dataclass
class NeumannState(State):
    """Sums of products of the factors; None where nothing asks for them.

    Attributes:
        key_value: (B, H, M, D), phi_k^T v.
        count: (B,), number of valid tokens.
        key_mass: (B, H, M), sum of phi_k (row-stochastic graphs).
        query_mass: (B, H, M), sum of phi_q (for the importance map).
        key_query: (B, H, M, M), phi_k^T phi_q (more hops than one).
        query_query: (B, H, M, M), phi_q^T phi_q (Frobenius norm).
        key_key: (B, H, M, M), phi_k^T phi_k (Frobenius norm).
    """

    key_value: Tensor
    count: Tensor
    key_mass: Tensor | None = None
    query_mass: Tensor | None = None
    key_query: Tensor | None = None
    query_query: Tensor | None = None
    key_key: Tensor | None = None


def sum_chain(
    phi_k: Tensor,
    v: Tensor,
    valid: Tensor | None = None,
    phi_q: Tensor | None = None,
) -> NeumannState:
    """Sums of a row-stochastic (landmark) graph over some tokens.

    Args:
        phi_k: (B, H, N, M), not normalised.
        v: (B, H, N, D).
        valid: (B, N) bool; invalid tokens enter with weight zero.
        phi_q: (B, H, N, M), needed with more hops than one and for the
            importance map; None leaves its sums out.
    """
    phi_k, v = hide(phi_k, valid), hide(v, valid).to(phi_k.dtype)
    state = NeumannState(
        key_value=phi_k.mT @ v,
        count=count_tokens(phi_k, valid),
        key_mass=phi_k.sum(-2),
    )
    if phi_q is not None:
        phi_q = hide(phi_q, valid)
        state.query_mass = phi_q.sum(-2)
        state.key_query = phi_k.mT @ phi_q
    return state


def sum_graph(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, valid: Tensor | None = None
) -> NeumannState:
    """Sums of a graph under the Frobenius norm; arguments as above."""
    phi_q, phi_k = hide(phi_q, valid), hide(phi_k, valid)
    v = hide(v, valid).to(phi_k.dtype)
    return NeumannState(
        key_value=phi_k.mT @ v,
        count=count_tokens(phi_k, valid),
        key_query=phi_k.mT @ phi_q,
        query_query=phi_q.mT @ phi_q,
        key_key=phi_k.mT @ phi_k,
    )


def read_chain(
    state: NeumannState, discount: Tensor | float | None, hops: float
) -> Tensor:
    """Finish a row-stochastic graph: the value that waits at each landmark.

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
    assert discount is not None
    gamma = as_discount(discount, value)
    chain = gamma * landmark_walk(state)
    if math.isinf(hops):
        return (1 - gamma) * torch.linalg.solve(_eye(chain) - chain, value)
    total = _geometric(chain, value, int(hops))
    return total * (1 - gamma) / (1 - gamma**hops)


def read_graph(
    state: NeumannState, discount: Tensor | float, hops: float
) -> Tensor:
    """Finish a graph under the Frobenius norm (Woodbury), (B, H, M, D).

    ``sum_{t=1..T} (g S)^t v = phi_q g (sum_{t<T} (g M)^t) phi_k^T v`` with
    ``M = phi_k^T phi_q`` and ``g = discount / (|S| + eps)``. Arguments as for
    :func:`read_chain`.
    """
    assert state.query_query is not None and state.key_key is not None
    assert state.key_query is not None
    square = (state.query_query * state.key_key).sum((-2, -1))
    # The floor keeps the gradient of the root finite for an empty graph.
    norm = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()
    gain = as_discount(discount, square) / (norm[..., None, None] + EPS)
    walk = gain * state.key_query
    if math.isinf(hops):
        total = torch.linalg.solve(_eye(walk) - walk, state.key_value)
    else:
        total = _geometric(walk, state.key_value, int(hops))
    return gain * total


def landmark_walk(state: NeumannState) -> Tensor:
    """L = phi_k^T phi_q, the chain seen from the landmarks, (B, H, M, M)."""
    assert state.key_query is not None
    return state.key_query / _landmark_mass(state)


def attend(phi_q: Tensor, readout: Tensor) -> Tensor:
    """Each token's own output, phi_q times the readout, (B, H, N, D)."""
    return phi_q @ readout


def importance_readout(
    state: NeumannState, discount: Tensor | float | None, hops: float
) -> Tensor:
    """Finish the importance map of a row-stochastic graph, (B, H, M).

    Args:
        state: sums with ``query_mass`` and ``key_query`` (give ``phi_q`` to
            :func:`sum_chain`).
        discount, hops: as for :func:`read_chain`.

    Returns:
        Weights for :func:`importance`.
    """
    assert state.query_mass is not None
    mass = state.query_mass[..., None, :]
    if hops != 1:
        assert discount is not None
        gamma = as_discount(discount, mass)
        walk = landmark_walk(state)
        mass = torch.linalg.solve(_eye(walk) - gamma * walk, mass, left=False)
    return (mass / _landmark_mass(state).mT).squeeze(-2)


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
        weights: of :func:`importance_readout`.
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


def _landmark_mass(state: NeumannState) -> Tensor:
    """(B, H, M, 1), one where no token has reached the landmark."""
    assert state.key_mass is not None
    mass = state.key_mass
    return torch.where(mass > 0, mass, torch.ones_like(mass))[..., None]


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(
        matrix.shape[-1], dtype=matrix.dtype, device=matrix.device
    )


def _geometric(matrix: Tensor, value: Tensor, terms: int) -> Tensor:
    """``sum_{t<terms} matrix^t value``."""
    total = value
    for _ in range(terms - 1):
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
    """Diffusion over a row-stochastic graph of projected tokens, by chunks.

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
        sum_graph(q, k, value, ok)
        for q, k, value, ok in chunk_tokens(
            num_chunks, phi_q, phi_k, v, valid=valid
        )
    )
    readout = read_graph(state, discount, hops)
    return hide(attend(phi_q, readout).to(v.dtype), valid)
