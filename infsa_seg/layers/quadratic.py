# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Attention of O(N^2): whole images only, every token meets every token.

Shapes: B batch, H heads, N queries, L keys, D width per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infsa_seg.ops import Context, hide, reference

from .attention import InfSAAttention, flat, parse_hops
from .autocast import no_autocast
from .protocol import Merge, identity


class _QuadraticAttention(InfSAAttention):
    """No mergeable state, hence no verbs."""

    def _attend_to_itself(
        self,
        x: Tensor,
        merge: Merge,
        valid: Tensor | None,
        context: Context | None,
    ) -> Tensor:
        if merge is not identity:
            raise ValueError(
                f'attention of variant {self.variant!r} has no mergeable '
                "state and needs the whole image; use 'linear' or 'neumann'"
            )
        tokens, mask = flat(x, valid)
        out, _ = self.operate(
            self.queries(tokens),
            self.keys(tokens),
            self.values(tokens),
            mask,
            mask,
            need_weights=False,
        )
        return self.join_heads(out).view(x.shape)


class PureInfSA(_QuadraticAttention, variant='pure'):
    """Pure InfSA (DESIGN 3.1), the ground truth.

    Args:
        *args, **kwargs: as for :class:`InfSAAttention`.
        hops: steps of the diffusion, a positive integer or 'inf'.

    Attributes:
        num_dead: int64 scalar, how often in training a head had no positive
            score and fell back to the mean. Not saved.
    """

    def __init__(
        self, *args: Any, hops: float | str = 1, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.hops = parse_hops(hops)
        self.num_dead: Tensor
        self.register_buffer(
            'num_dead', torch.empty((), dtype=torch.long), persistent=False
        )
        PureInfSA.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.num_dead.zero_()

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if self.hops != 1 and q.shape[2] != k.shape[2]:
            raise ValueError(
                f'hops={self.hops:g} walks from token to token and needs as '
                f'many queries ({q.shape[2]}) as keys ({k.shape[2]})'
            )
        with no_autocast(q.device):
            scores, dead = reference.pure_scores(
                q, k, self.discount, valid, query_valid
            )
            if self.training:
                self.num_dead += dead.sum()
            v = hide(v, valid).to(scores.dtype)
            out = reference.power_series(scores, v, self.hops)
            if not need_weights or self.hops == 1:
                return out, scores if need_weights else None
            eye = torch.eye(
                k.shape[2], dtype=scores.dtype, device=scores.device
            )
            return out, reference.power_series(
                scores, eye.expand_as(scores), self.hops
            )


class SoftmaxAttention(_QuadraticAttention, variant='softmax'):
    """Softmax attention, for comparison.

    Args:
        *args, **kwargs: as for :class:`InfSAAttention`. There is no discount.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.discount_logit = None

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if need_weights:
            return reference.softmax_attention(q, k, v, valid, query_valid)
        mask = None if valid is None else valid[:, None, None, :]
        return nn.functional.scaled_dot_product_attention(
            q, hide(k, valid), hide(v, valid), mask
        ), None
