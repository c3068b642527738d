# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Linear-InfSA in two phases of additive sums (DESIGN 3.2).

Phase 0 sums the query energy, phase 1 the scores. Both weigh a *payload* per
token, and the payload decides the form. In the direct form it is the query
and the value of a head. In the projection-free form it is the layer input,
shared by all heads: the projections are linear, so they move behind the sum
and act on H vectors instead of N, and keys and values are never formed.
Shapes: B batch, H heads, N tokens, D width per head, C width of the payload
(D, or the embedding's width).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .state import State, merge_all, sum_dtype
from .tokens import (
    EPS,
    as_discount,
    chunk_tokens,
    count_tokens,
    hide,
    sum_products,
)


@dataclasses.dataclass
class EnergyState(State):
    """Phase 0.

    Attributes:
        energy: (B, H), sum of the query norms.
        weighted: (B, H, C), sum of norm times payload.
    """

    energy: Tensor
    weighted: Tensor


@dataclasses.dataclass
class ScoreState(State):
    """Phase 1.

    Attributes:
        score: (B, H), sum of the scores.
        weighted: (B, H, C), sum of score times payload.
        plain: (B, C) or (B, H, C), sum of the payload, for dead heads.
        count: (B,), number of valid tokens.
    """

    score: Tensor
    weighted: Tensor
    plain: Tensor
    count: Tensor


def _weighted_sum(weights: Tensor, payload: Tensor) -> Tensor:
    """(B, H, N) with (B, N, C) or (B, H, N, C) to (B, H, C)."""
    if payload.dim() == 3:
        return sum_products(weights.mT, payload)
    return sum_products(weights.unsqueeze(-1), payload).squeeze(-2)


def sum_energy(
    q: Tensor, payload: Tensor, valid: Tensor | None = None
) -> EnergyState:
    """Phase 0 over some tokens.

    Args:
        q: (B, H, N, D) queries, not scaled.
        payload: q itself (direct form) or the layer input (B, N, C).
        valid: (B, N) bool; invalid tokens enter with weight zero.
    """
    dtype = sum_dtype(q.dtype)
    q, payload = hide(q, valid).to(dtype), hide(payload, valid).to(dtype)
    energy = torch.linalg.vector_norm(q, dim=-1) / math.sqrt(q.shape[-1])
    return EnergyState(energy.sum(-1), _weighted_sum(energy, payload))


def mean_query(
    state: EnergyState,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The energy-weighted mean of the scaled queries, (B, H, D).

    Args:
        state: phase 0 of the whole image.
        weight, bias: the query projection, (H * D, C) and (H * D,), where the
            payload was the layer input; None in the direct form.
    """
    total = state.weighted
    if weight is not None:
        total = _project(total, weight, bias, state.energy)
    scale = 1 / math.sqrt(total.shape[-1])
    return total * scale / (state.energy + EPS)[..., None]


def probe_keys(
    query: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Move the key projection to the query's side.

    Args:
        query: (B, H, D) mean query.
        weight, bias: the key projection, (H * D, C) and (H * D,).

    Returns:
        ``probe`` (B, H, C) and ``offset`` (B, H) such that the unscaled score
        of a token x is ``probe . x + offset``.
    """
    num_heads, width = query.shape[1:]
    weight = weight.to(query.dtype).view(num_heads, width, -1)
    probe = torch.einsum('bhd,hdc->bhc', query, weight)
    if bias is None:
        return probe, probe.new_zeros(probe.shape[:2])
    bias = bias.to(query.dtype).view(num_heads, width)
    return probe, torch.einsum('bhd,hd->bh', query, bias)


def score_keys(k: Tensor, query: Tensor) -> Tensor:
    """Scores of projected keys, ``relu(query . k / sqrt(d))``, (B, H, N).

    Args:
        k: (B, H, N, D).
        query: (B, H, D) mean query.
    """
    products = (k.to(query.dtype) @ query.unsqueeze(-1)).squeeze(-1)
    return (products / math.sqrt(k.shape[-1])).relu()


def score_inputs(
    x: Tensor, probe: Tensor, offset: Tensor, width: int
) -> Tensor:
    """Scores straight from the layer input, (B, H, N).

    Args:
        x: (B, N, C).
        probe, offset: of :func:`probe_keys`.
        width: D, for the scale ``1 / sqrt(d)`` of the keys.
    """
    products = probe @ x.to(probe.dtype).mT + offset[..., None]
    return (products / math.sqrt(width)).relu()


def sum_scores(
    scores: Tensor, payload: Tensor, valid: Tensor | None = None
) -> ScoreState:
    """Phase 1 over some tokens.

    Args:
        scores: (B, H, N), not normalised.
        payload: values (B, H, N, D) or the layer input (B, N, C).
        valid: (B, N) bool.
    """
    scores = hide(scores[..., None], valid).squeeze(-1)
    payload = hide(payload, valid).to(scores.dtype)
    return ScoreState(
        score=scores.sum(-1),
        weighted=_weighted_sum(scores, payload),
        plain=payload.sum(-2),
        count=count_tokens(payload, valid),
    )


def dead_heads(state: ScoreState) -> Tensor:
    """(B, H) bool: no token of the image has a positive score."""
    return (state.score <= 0) & (state.count > 0)[:, None]


def read_scores(
    state: ScoreState,
    discount: Tensor | float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The head outputs that every token receives, (B, H, D).

    A dead head falls back to the mean over all tokens, so that it keeps an
    output and a gradient.

    Args:
        state: phase 1 of the whole image.
        discount: in (0, 1), scalar or (H,).
        weight, bias: the value projection where the payload was the layer
            input; None in the direct form.
    """
    dead = dead_heads(state)
    plain = state.plain
    if plain.dim() == 2:
        plain = plain[:, None].expand_as(state.weighted)
    norm = torch.where(
        dead, state.count[:, None].clamp_min(1), state.score + EPS
    )
    mean = torch.where(dead[..., None], plain, state.weighted)
    mean = mean / norm[..., None]
    if weight is not None:
        mass = torch.where(dead, state.count[:, None], state.score) / norm
        mean = _project(mean, weight, bias, mass)
    return mean * as_discount(discount, mean)[..., 0]


def importance(
    scores: Tensor, state: ScoreState, valid: Tensor | None = None
) -> Tensor:
    """The weight of each token in the mean over tokens, (B, H, N).

    ``a / (sum a + eps)``, or ``1 / N`` in a dead head.

    Args:
        scores: (B, H, N), not normalised.
        state: phase 1 of the whole image.
        valid: (B, N) bool.
    """
    dead = dead_heads(state)[..., None]
    uniform = 1 / state.count[:, None, None].clamp_min(1)
    weights = scores / (state.score + EPS)[..., None]
    weights = torch.where(dead, uniform, weights)
    return hide(weights[..., None], valid).squeeze(-1)


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, mass: Tensor
) -> Tensor:
    """Apply each head's rows of a projection to that head's weighted sum.

    Args:
        x: (B, H, C) sums of weight times token.
        weight, bias: (H * D, C) and (H * D,).
        mass: (B, H) sums of the weights, which multiply the bias.
    """
    num_heads = x.shape[1]
    weight = weight.to(x.dtype).view(num_heads, -1, x.shape[-1])
    out = torch.einsum('bhc,hdc->bhd', x, weight)
    if bias is not None:
        out = out + mass[..., None] * bias.to(x.dtype).view(num_heads, -1)
    return out


def linear_infsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    discount: Tensor | float,
    valid: Tensor | None = None,
    num_chunks: int = 1,
) -> Tensor:
    """Linear-InfSA of projected tokens in O(N D), by chunks.

    Args:
        q, k, v: (B, H, N, D).
        discount: in (0, 1), scalar or (H,).
        valid: (B, N) bool, or None for all.
        num_chunks: how many parts the tokens are summed in.

    Returns:
        (B, H, N, D) in the dtype of ``v``; one row per head, expanded over
        the tokens, and zero where invalid.
    """
    chunks = chunk_tokens(num_chunks, q, k, v, valid=valid)
    energy = merge_all(sum_energy(q, q, ok) for q, _, _, ok in chunks)
    query = mean_query(energy)
    scores = merge_all(
        sum_scores(score_keys(k, query), v, ok) for _, k, v, ok in chunks
    )
    context = read_scores(scores, discount).to(v.dtype)
    return hide(context[:, :, None].expand_as(v), valid)
