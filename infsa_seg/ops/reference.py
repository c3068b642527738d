# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The plain forms, as short as the formulas, in any float dtype.

Everything here builds what the fast forms avoid (the N x N matrix, keys and
values of every token) and exists to be compared with. Legend of shapes: B
batch, H heads, N tokens, D width per head, M width of the graph's factors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .solve import solve
from .state import sum_dtype
from .tokens import EPS, as_discount, hide


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, for comparison.

    Args:
        q: (B, H, N, D).
        k, v: (B, H, L, D).
        valid: (B, L) bool; invalid keys give nothing.
        query_valid: (B, N) bool; invalid queries receive nothing. None for
            the same mask as of the keys.

    Returns:
        The output (B, H, N, D) and the weights (B, H, N, L).
    """
    query_valid = valid if query_valid is None else query_valid
    scores = q @ hide(k, valid).mT / math.sqrt(q.shape[-1])
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], -torch.inf)
    scores = hide(scores.softmax(-1).nan_to_num(0.0), query_valid)
    return scores @ hide(v, valid), scores


def pure_infsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
    hops: float = 1,
) -> tuple[Tensor, Tensor]:
    """Pure InfSA (DESIGN 3.1).

    Args:
        q: (B, H, N, D).
        k, v: (B, H, L, D), L = N with more hops than one.
        discount, valid, query_valid: as for :func:`pure_scores`.
        hops: T, a positive integer or ``math.inf``.

    Returns:
        The output ``sum_{t=1..T} (g A)^t v``, (B, H, N, D) in the dtype of v,
        and the scores ``g A`` of one hop, (B, H, N, L).
    """
    scores, _ = pure_scores(q, k, discount, valid, query_valid)
    value = hide(v, valid).to(scores.dtype)
    return power_series(scores, value, hops).to(v.dtype), scores


def pure_scores(
    q: Tensor,
    k: Tensor,
    discount: Tensor | float,
    valid: Tensor | None = None,
    query_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``g relu(q k^T) / d / (frobenius + eps)``, in float32 or better.

    Args:
        q: (B, H, N, D).
        k: (B, H, L, D).
        discount: g, in (0, 1), scalar or (H,).
        valid: (B, L) bool; invalid keys give nothing.
        query_valid: (B, N) bool; invalid queries receive nothing. None for
            the same mask as of the keys.

    Returns:
        The scores (B, H, N, L), and (B, H), True where a head has no positive
        score. It falls back to the graph that joins all tokens alike.
    """
    query_valid = valid if query_valid is None else query_valid
    q, k = (x.to(sum_dtype(x.dtype)) for x in (q, k))
    q, k = hide(q, query_valid), hide(k, valid)
    scores = (q @ k.mT / q.shape[-1]).relu()
    norm = torch.linalg.matrix_norm(scores)[..., None, None]
    uniform = hide(_uniform(scores, valid), query_valid)
    scores = torch.where(norm > 0, scores / (norm + EPS), uniform)
    dead = norm[..., 0, 0] <= 0
    return as_discount(discount, q) * scores, dead


def _uniform(graph: Tensor, valid: Tensor | None) -> Tensor:
    """Every row joined to all valid tokens alike, (B, H, N, L)."""
    members = hide(torch.ones_like(graph).mT, valid).mT
    return members / members.sum(-1, keepdim=True).clamp_min(1)


def power_series(graph: Tensor, v: Tensor, hops: float) -> Tensor:
    """``sum_{t=1..T} graph^t v``, by a solve for infinitely many.

    Args:
        graph: (B, H, N, N) of spectral radius below one; (B, H, N, L) will do
            with one hop.
        v: (B, H, L, D).
        hops: T, a positive integer or ``math.inf``.
    """
    if math.isinf(hops):
        eye = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
        return solve(eye - graph, graph @ v)
    term = total = graph @ v
    for _ in range(int(hops) - 1):
        term = graph @ term
        total = total + term
    return total


def linear_infsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear-InfSA, from queries, keys and values (DESIGN 3.2).

    Args:
        q, k, v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,).
        valid: (B, N) bool.

    Returns:
        The output (B, H, N, D), the same row for every valid token, and the
        scores ``discount * a`` as (B, H, N, 1). A head whose scores are all
        zero falls back to ``a = 1 / N``.
    """
    q, k, v = (hide(x, valid) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    energy = torch.linalg.vector_norm(q * scale, dim=-1, keepdim=True)
    weights = energy / (energy.sum(-2, keepdim=True) + EPS)
    mean_query = (weights * q * scale).sum(-2, keepdim=True)
    scores = (k * scale @ mean_query.mT).relu()
    total = scores.sum(-2, keepdim=True)
    members = hide(torch.ones_like(scores), valid)
    uniform = members / members.sum(-2, keepdim=True).clamp_min(1)
    scores = torch.where(total > 0, scores / (total + EPS), uniform)
    scores = as_discount(discount, q) * scores
    output = (scores * v).sum(-2, keepdim=True).expand_as(v)
    return hide(output, valid), scores


def neumann_series(
    transition: Tensor, v: Tensor, discount: Tensor | None, hops: float
) -> Tensor:
    """Diffuse ``v`` over a row-stochastic graph, hop by hop.

    ``sum_{t=1..T} g^(t-1) P^t v``, divided by ``sum_{t=1..T} g^(t-1)`` so that
    the weights of the hops add up to one; one hop is ``P v`` and infinitely
    many are ``(1 - g) P (I - g P)^-1 v``.

    Args:
        transition: P, (B, H, N, N).
        v: (B, H, N, D).
        discount: g, broadcastable to (B, H, 1, 1); unused with one hop.
        hops: T, an integer or ``math.inf``.
    """
    if hops == 1:
        return transition @ v
    assert discount is not None
    if math.isinf(hops):
        eye = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
        return (1 - discount) * (
            transition @ solve(eye - discount * transition, v)
        )
    total = torch.zeros_like(v)
    term = v
    for hop in range(int(hops)):
        term = transition @ term if hop == 0 else discount * transition @ term
        total = total + term
    return total * (1 - discount) / (1 - discount**hops)


def landmark_chain(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """The N x N Markov chain of a landmark graph (DESIGN 3.3).

    Args:
        phi_q: (B, H, N, M), rows on the simplex, zero where invalid.
        phi_k: (B, H, N, M), not yet divided by its column sums.
    """
    return phi_q @ (phi_k / phi_k.sum(-2, keepdim=True)).mT


def neumann_frobenius(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    hops: float,
    valid: Tensor | None = None,
) -> Tensor:
    """``sum_{t=1..T} (g S)^t v`` with S = phi_q phi_k^T, g = discount / |S|.

    A head without any edge falls back to ``S = 1 / N``.

    Args:
        phi_q, phi_k: (B, H, N, M).
        v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,).
        hops: T, an integer or ``math.inf`` (by solve).
        valid: (B, N) bool.
    """
    graph = hide(phi_q, valid) @ hide(phi_k, valid).mT
    norm = torch.linalg.matrix_norm(graph)[..., None, None]
    uniform = _uniform(graph, valid)
    graph = torch.where(norm > 0, graph / (norm + EPS), uniform)
    graph = as_discount(discount, v) * graph
    return hide(power_series(graph, hide(v, valid), hops), valid)


def row_chain(
    phi_q: Tensor, phi_k: Tensor, valid: Tensor | None = None
) -> Tensor:
    """The N x N Markov chain of a row-normalised graph (DESIGN 3.3).

    A token without an edge walks to all valid tokens alike.

    Args:
        phi_q, phi_k: (B, H, N, M), non-negative.
        valid: (B, N) bool.
    """
    graph = hide(phi_q, valid) @ hide(phi_k, valid).mT
    degree = graph.sum(-1, keepdim=True)
    chain = graph / torch.where(degree > 0, degree, 1.0)
    chain = torch.where(degree > 0, chain, _uniform(graph, valid))
    return hide(chain, valid)
