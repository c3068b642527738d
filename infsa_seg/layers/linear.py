# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Linear-InfSA as a layer (DESIGN 3.2), in two phases.

Shapes: B batch, H heads, N tokens, D width per head, C channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from infsa_seg.ops import Context, EnergyState, ScoreState, State, linear

from .attention import InfSAAttention, flat
from .autocast import no_autocast


@dataclasses.dataclass
class LinearContext(Context):
    """What the phases of Linear-InfSA leave.

    Attributes:
        query: (B, H, D), the mean query, after phase 0.
        probe, offset: (B, H, C) and (B, H), the mean query seen from the
            layer input, after phase 0 (projection-free form).
        output: (B, C), what every token receives, after phase 1.
        scores: the sums of phase 1, for the importance of each token.
    """

    query: Tensor | None = None
    probe: Tensor | None = None
    offset: Tensor | None = None
    output: Tensor | None = None
    scores: ScoreState | None = None


class LinearInfSA(InfSAAttention, variant='linear'):
    """The paper's Linear-InfSA.

    Args:
        *args, **kwargs: as for :class:`InfSAAttention`.
        projection_free: sum layer inputs instead of projected keys and
            values. Exact, and cheaper by the K and V projections. With a
            ``key_recurrence`` keys are projected all the same.

    Attributes:
        num_dead: int64 scalar, how often in training a head had no positive
            score and fell back to the mean. Not saved.
    """

    num_phases = 2

    def __init__(
        self, *args: Any, projection_free: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.projection_free = projection_free
        self.num_dead: Tensor
        self.register_buffer(
            'num_dead', torch.empty((), dtype=torch.long), persistent=False
        )
        LinearInfSA.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.num_dead.zero_()

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> State:
        heads = (batch, self.num_heads)
        width = self.embed_dims if self.projection_free else self.head_dims
        zeros = torch.zeros(*heads, width, device=device)
        if phase == 0:
            return EnergyState(zeros[..., 0], zeros)
        plain = zeros[:, 0] if self.projection_free else zeros
        return ScoreState(zeros[..., 0], zeros, plain, zeros[:, 0, 0])

    def accumulate(
        self,
        x: Tensor,
        state: State,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> State:
        x, valid = flat(x, valid)
        if phase == 0:
            q = self.queries(x)
            payload = x if self.projection_free else q
            with no_autocast(x.device):
                return state.merge(linear.sum_energy(q, payload, valid))
        payload = x if self.projection_free else self.values(x)
        scores = self._scores(x, context)
        with no_autocast(x.device):
            return state.merge(linear.sum_scores(scores, payload, valid))

    def finalize(
        self, state: State, phase: int, context: Context
    ) -> LinearContext:
        if phase == 0:
            assert isinstance(state, EnergyState)
            with no_autocast(state.energy.device):
                return self._aim(state, context)
        assert isinstance(state, ScoreState)
        assert isinstance(context, LinearContext)
        with no_autocast(state.score.device):
            heads = linear.read_scores(
                state, self.discount, *self._behind_the_sum(self.v_proj)
            )
            self._count_dead(state)
            output = nn.functional.linear(
                heads.flatten(1),
                self.out_proj.weight.to(heads.dtype),
                self.out_proj.bias.to(heads.dtype),
            )
        return dataclasses.replace(context, output=output, scores=state)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, LinearContext)
        assert context.output is not None
        output = context.output.to(x.dtype)
        return output.view(
            x.shape[0], *(1,) * (x.dim() - 2), self.embed_dims
        ).expand_as(x)

    def importance(
        self, x: Tensor, context: Context, valid: Tensor | None = None
    ) -> Tensor:
        """The share of each token in the output, (B, H, N) of (B, ..., C)."""
        assert isinstance(context, LinearContext)
        assert context.scores is not None
        x, valid = flat(x, valid)
        with no_autocast(x.device):
            return linear.importance(
                self._scores(x, context), context.scores, valid
            )

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        with no_autocast(q.device):
            query = linear.mean_query(linear.sum_energy(q, q, query_valid))
            scores = linear.score_keys(k, query)
            state = linear.sum_scores(scores, v, valid)
            self._count_dead(state)
            out = linear.read_scores(state, self.discount)
            weights = None
            if need_weights:
                weights = linear.importance(scores, state, valid)
        return out[:, :, None].expand(-1, -1, q.shape[2], -1), weights

    def _aim(self, state: EnergyState, context: Context) -> LinearContext:
        query = linear.mean_query(state, *self._behind_the_sum(self.q_proj))
        result = LinearContext(context.num_tokens, query)
        if self._scores_inputs:
            result.probe, result.offset = linear.probe_keys(
                query, self.k_proj.weight, self.k_proj.bias
            )
        return result

    @property
    def _scores_inputs(self) -> bool:
        """Whether scores come from the layer input; u is not linear in it."""
        return self.projection_free and self.recurrence is None

    def _scores(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, LinearContext)
        assert context.query is not None
        if not self._scores_inputs:
            k = self.keys(x)
            with no_autocast(x.device):
                return linear.score_keys(k, context.query)
        assert context.probe is not None and context.offset is not None
        with no_autocast(x.device):
            return linear.score_inputs(
                x, context.probe, context.offset, self.head_dims
            )

    def _behind_the_sum(
        self, projection: nn.Linear
    ) -> tuple[Tensor | None, Tensor | None]:
        """The projection that a sum of layer inputs still has to pass."""
        if not self.projection_free:
            return None, None
        return projection.weight, projection.bias

    def _count_dead(self, state: ScoreState) -> None:
        if self.training:
            self.num_dead += linear.dead_heads(state).sum()
