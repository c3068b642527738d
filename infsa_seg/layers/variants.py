# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The operators as layers: two of O(N) by the verbs, two quadratic.

Shapes: B batch, H heads, N tokens, D width per head, C channels, M width of
the graph's factors.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import torch
from torch import Tensor, nn

from infsa_seg.ops import (
    Context,
    EnergyState,
    NeumannState,
    ScoreState,
    State,
    crelu,
    hide,
    landmark_keys,
    landmark_queries,
    landmark_temperature,
    linear,
    neumann,
    reference,
)

from .attention import InfSAAttention
from .protocol import Merge, identity


def no_autocast(device: torch.device) -> torch.autocast:
    """Keep the sums in their own dtype inside an autocast region."""
    return torch.autocast(device.type, enabled=False)


def flat(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A band (B, ..., C) and its mask (B, ...) as tokens (B, N, ...)."""
    return x.flatten(1, -2), None if valid is None else valid.flatten(1)


@dataclasses.dataclass
class LinearContext(Context):
    """What the phases of Linear-InfSA leave.

    Attributes:
        query: (B, H, D), the mean query, after phase 0.
        probe, offset: (B, H, C) and (B, H), the mean query seen from the
            layer input, after phase 0 (projection-free form).
        output: (B, C), what every token receives, after phase 1.
    """

    query: Tensor | None = None
    probe: Tensor | None = None
    offset: Tensor | None = None
    output: Tensor | None = None


class LinearInfSA(InfSAAttention, variant='linear'):
    """The paper's Linear-InfSA (DESIGN 3.2), in two phases.

    Args:
        embed_dims, num_heads, qkv_bias, discount, rho: as for
            :class:`InfSAAttention`.
        projection_free: sum layer inputs instead of projected keys and
            values. Exact, and cheaper by the K and V projections.

    Attributes:
        num_dead: int64 scalar, how often in training a head had no positive
            score and fell back to the mean. Not saved.
    """

    num_phases = 2

    def __init__(
        self, *args: object, projection_free: bool = True, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.projection_free = projection_free
        self.num_dead: Tensor
        self.register_buffer(
            'num_dead', torch.zeros((), dtype=torch.long), persistent=False
        )

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
            q = self.split_heads(self.q_proj(x))
            payload = x if self.projection_free else q
            with no_autocast(x.device):
                return state.merge(linear.sum_energy(q, payload, valid))
        assert isinstance(context, LinearContext)
        assert context.query is not None
        if not self.projection_free:
            k = self.split_heads(self.k_proj(x))
            v = self.split_heads(self.v_proj(x))
            with no_autocast(x.device):
                scores = linear.score_keys(k, context.query)
                return state.merge(linear.sum_scores(scores, v, valid))
        assert context.probe is not None and context.offset is not None
        with no_autocast(x.device):
            scores = linear.score_inputs(
                x, context.probe, context.offset, self.head_dims
            )
            return state.merge(linear.sum_scores(scores, x, valid))

    def finalize(
        self, state: State, phase: int, context: Context
    ) -> LinearContext:
        if phase == 0:
            assert isinstance(state, EnergyState)
            with no_autocast(state.energy.device):
                return self._aim(state, context)
        assert isinstance(state, ScoreState)
        with no_autocast(state.score.device):
            heads = linear.read_scores(
                state,
                self.discount,
                *(self._behind_the_sum(self.v_proj)),
            )
            if self.training:
                self.num_dead += linear.dead_heads(state).sum()
            output = nn.functional.linear(
                heads.flatten(1),
                self.out_proj.weight.to(heads.dtype),
                self.out_proj.bias.to(heads.dtype),
            )
        return LinearContext(context.num_tokens, output=output)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, LinearContext)
        assert context.output is not None
        output = context.output.to(x.dtype)
        return output.view(
            x.shape[0], *(1,) * (x.dim() - 2), self.embed_dims
        ).expand_as(x)

    def _aim(self, state: EnergyState, context: Context) -> LinearContext:
        query = linear.mean_query(state, *self._behind_the_sum(self.q_proj))
        result = LinearContext(context.num_tokens, query)
        if self.projection_free:
            result.probe, result.offset = linear.probe_keys(
                query, self.k_proj.weight, self.k_proj.bias
            )
        return result

    def _behind_the_sum(
        self, projection: nn.Linear
    ) -> tuple[Tensor | None, Tensor | None]:
        """The projection that a sum of layer inputs still has to pass."""
        if not self.projection_free:
            return None, None
        return projection.weight, projection.bias


@dataclasses.dataclass
class NeumannContext(Context):
    """What the one phase of Neumann InfSA leaves.

    Attributes:
        readout: (B, H, M, D), the value that waits at each factor.
    """

    readout: Tensor | None = None


class NeumannInfSA(InfSAAttention, variant='neumann'):
    """Diffusion over a factorised token graph (DESIGN 3.3), in one phase.

    Args:
        embed_dims, num_heads, qkv_bias, discount, rho: as for
            :class:`InfSAAttention`. The landmark graph with one hop has no
            discount.
        graph: 'landmark' (a Markov chain through learned landmarks) or
            'crelu' (feature graph under the Frobenius norm).
        hops: steps of the diffusion, a positive integer or 'inf'.
        num_landmarks: M of the landmark graph.
        log_n: grow the landmark temperature with the log of the number of
            tokens, so that the graph stays as sharp on a large image as it
            was in training.

    Attributes:
        num_tokens_ref: int64 scalar, the most tokens that an image had in
            training; 0 before. Saved.
    """

    num_phases = 1

    def __init__(
        self,
        *args: object,
        graph: str = 'landmark',
        hops: float | str = 1,
        num_landmarks: int = 32,
        log_n: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        hops = float(hops)
        if hops < 1 or (math.isfinite(hops) and hops != int(hops)):
            raise ValueError(f"hops={hops} is no positive integer or 'inf'")
        if graph not in ('landmark', 'crelu'):
            raise ValueError(
                f"graph={graph!r} is unknown; choose 'landmark' or 'crelu'"
            )
        self.hops = hops
        self.graph = graph
        self.log_n = log_n
        self.factor_dims = 2 * self.head_dims
        self.num_tokens_ref: Tensor
        if graph == 'landmark':
            self.factor_dims = num_landmarks
            self.landmarks = nn.Parameter(
                torch.empty(self.num_heads, num_landmarks, self.head_dims)
            )
            nn.init.normal_(self.landmarks)
            self.log_temperature = nn.Parameter(
                torch.full((self.num_heads,), math.log(10.0))
            )
            self.register_buffer(
                'num_tokens_ref', torch.zeros((), dtype=torch.long)
            )
            if hops == 1:
                self.discount_logit = None

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> NeumannState:
        m = self.factor_dims

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, self.num_heads, *shape, device=device)

        state = NeumannState(
            zeros(m, self.head_dims), torch.zeros(batch, device=device)
        )
        if self.graph == 'crelu':
            state.key_query = zeros(m, m)
            state.query_query, state.key_key = zeros(m, m), zeros(m, m)
            return state
        state.key_mass = zeros(m)
        if self.hops > 1:
            state.query_mass, state.key_query = zeros(m), zeros(m, m)
        return state

    def accumulate(
        self,
        x: Tensor,
        state: NeumannState,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> NeumannState:
        x, valid = flat(x, valid)
        phi_k = self._key_factors(x, context)
        v = self.split_heads(self.v_proj(x))
        if self.graph == 'crelu':
            phi_q = self._query_factors(x, context)
            with no_autocast(x.device):
                return state.merge(neumann.sum_graph(phi_q, phi_k, v, valid))
        walk = self._query_factors(x, context) if self.hops > 1 else None
        with no_autocast(x.device):
            return state.merge(neumann.sum_chain(phi_k, v, valid, walk))

    def finalize(
        self, state: NeumannState, phase: int, context: Context
    ) -> NeumannContext:
        with no_autocast(state.key_value.device):
            if self.graph == 'crelu':
                readout = neumann.read_graph(state, self.discount, self.hops)
            else:
                discount = self.discount if self.hops > 1 else None
                readout = neumann.read_chain(state, discount, self.hops)
        return NeumannContext(context.num_tokens, readout)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, NeumannContext)
        assert context.readout is not None
        phi_q = self._query_factors(x.flatten(1, -2), context)
        with no_autocast(x.device):
            out = neumann.attend(phi_q, context.readout)
        out = out.to(x.dtype).transpose(1, 2).flatten(-2)
        return self.out_proj(out).view(x.shape)

    def _query_factors(self, x: Tensor, context: Context) -> Tensor:
        q = self.split_heads(self.q_proj(x))
        with no_autocast(x.device):
            if self.graph == 'crelu':
                return crelu(q)
            return landmark_queries(
                q, self.landmarks, self._temperature(context)
            )

    def _key_factors(self, x: Tensor, context: Context) -> Tensor:
        k = self.split_heads(self.k_proj(x))
        with no_autocast(x.device):
            if self.graph == 'crelu':
                return crelu(k)
            return landmark_keys(k, self.landmarks, self._temperature(context))

    def _temperature(self, context: Context) -> Tensor:
        if not self.log_n:
            return landmark_temperature(self.log_temperature)
        assert context.num_tokens is not None
        most = context.num_tokens.max().long()
        if self.training:
            # A maximum, so that recomputing a forward changes nothing.
            self.num_tokens_ref.copy_(torch.maximum(self.num_tokens_ref, most))
        ref = torch.where(self.num_tokens_ref > 0, self.num_tokens_ref, most)
        return landmark_temperature(
            self.log_temperature, context.num_tokens, ref
        )


class _QuadraticAttention(InfSAAttention):
    """Whole images only: every token meets every token."""

    @abc.abstractmethod
    def _operate(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> Tensor:
        """(B, H, N, D) each, with a (B, N) mask, to (B, H, N, D)."""

    def forward(
        self,
        x: Tensor,
        merge: Merge = identity,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        if merge is not identity:
            raise ValueError(
                f'attention of variant {self.variant!r} has no mergeable '
                "state and needs the whole image; use 'linear' or 'neumann'"
            )
        tokens, mask = flat(x, valid)
        q, k, v = (
            self.split_heads(projection(tokens))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self._operate(q, k, v, mask).transpose(1, 2).flatten(-2)
        return self.out_proj(out).view(x.shape)


class PureInfSA(_QuadraticAttention, variant='pure'):
    """Pure InfSA with one hop (DESIGN 3.1), O(N^2)."""

    def _operate(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> Tensor:
        return reference.pure_infsa(q, k, v, self.discount, valid)[0]


class SoftmaxAttention(_QuadraticAttention, variant='softmax'):
    """Softmax attention, for comparison, O(N^2)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.discount_logit = None

    def _operate(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> Tensor:
        mask = None if valid is None else valid[:, None, None, :]
        return nn.functional.scaled_dot_product_attention(
            q, hide(k, valid), hide(v, valid), mask
        )
