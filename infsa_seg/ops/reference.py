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

from .tokens import EPS, as_discount, hide


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention, for comparison; returns output and (B, H, N, N)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], -torch.inf)
    scores = hide(scores.softmax(-1).nan_to_num(0.0), valid)
    return scores @ hide(v, valid), scores


def pure_infsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pure InfSA with one hop (DESIGN 3.1).

    Args:
        q, k, v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,).
        valid: (B, N) bool; invalid tokens neither give nor receive.

    Returns:
        The output (B, H, N, D) and the scores
        ``discount * relu(q k^T) / d / (frobenius + eps)``, (B, H, N, N).
    """
    q, k, v = (hide(x, valid) for x in (q, k, v))
    scores = (q @ k.mT / q.shape[-1]).relu()
    norm = torch.linalg.matrix_norm(scores)[..., None, None]
    scores = as_discount(discount, q) * scores / (norm + EPS)
    return scores @ v, scores


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
            transition @ torch.linalg.solve(eye - discount * transition, v)
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
) -> Tensor:
    """``sum_{t=1..T} (g S)^t v`` with S = phi_q phi_k^T, g = discount / |S|.

    Args:
        phi_q, phi_k: (B, H, N, M), zero where invalid.
        v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,).
        hops: T, an integer or ``math.inf`` (by solve).
    """
    graph = phi_q @ phi_k.mT
    norm = torch.linalg.matrix_norm(graph)[..., None, None]
    graph = as_discount(discount, v) * graph / (norm + EPS)
    if math.isinf(hops):
        eye = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
        return torch.linalg.solve(eye - graph, v) - v
    total, term = torch.zeros_like(v), v
    for _ in range(int(hops)):
        term = graph @ term
        total = total + term
    return total


def pagerank(transition: Tensor, discount: Tensor, count: Tensor) -> Tensor:
    """Exact PageRank ``(1 - g) / N (I - g P^T)^-1 1``, (B, H, N).

    Args:
        transition: P, (B, H, N, N); rows and columns of invalid tokens zero.
        discount: g, broadcastable to (B, H, 1, 1).
        count: (B,) valid tokens.
    """
    eye = torch.eye(
        transition.shape[-1], dtype=transition.dtype, device=transition.device
    )
    ones = torch.ones_like(transition[..., :1])
    visits = torch.linalg.solve(eye - discount * transition.mT, ones)
    return ((1 - discount) / count[:, None, None, None] * visits).squeeze(-1)
