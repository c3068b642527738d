# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Neumann InfSA as layers (DESIGN 3.3), one class per kind of graph.

Shapes: B batch, H heads, N tokens, D width per head, C channels, M width of
the graph's factors.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from infsa_seg.ops import (
    FEATURE_MAPS,
    Context,
    NeumannState,
    State,
    WalkState,
    count_tokens,
    hide,
    landmark_keys,
    landmark_queries,
    landmark_temperature,
    neumann,
)

from .attention import InfSAAttention, flat, parse_hops
from .autocast import no_autocast


@dataclasses.dataclass
class NeumannContext(Context):
    """What the phases of Neumann InfSA leave.

    Attributes:
        readout: (B, H, M, D), the value that waits at each factor.
        fallback: (B, H, 1, D), what every token receives besides.
        key_mass, key_value: of the first of two phases.
        weights: (B, H, M), and
        uniform: (B, H, 1), from which the importance of a token is made.
    """

    readout: Tensor | None = None
    fallback: Tensor | None = None
    key_mass: Tensor | None = None
    key_value: Tensor | None = None
    weights: Tensor | None = None
    uniform: Tensor | None = None


class NeumannInfSA(InfSAAttention, variant='neumann'):
    """Diffusion over a factorised token graph; ``graph`` chooses its kind.

    Calling the class gives :class:`LandmarkInfSA`, :class:`RowInfSA` or
    :class:`FrobeniusInfSA`.

    Args:
        *args, **kwargs: as for :class:`InfSAAttention` and the kind.
        graph: 'landmark' (a Markov chain through learned landmarks), or a
            feature graph: 'crelu', 'focused' (sharper), 'relu' or 'identity'
            (the raw product of queries and keys, signed).
        norm: of a feature graph, 'frobenius' (the default) or 'row' (again a
            Markov chain; two phases with more hops than one).
        hops: steps of the diffusion, a positive integer or 'inf'.

    Attributes:
        with_importance: set it before the sums are made to have what
            :meth:`importance` needs. Off, an image costs less.
    """

    def __init__(
        self,
        *args: Any,
        graph: str = 'landmark',
        norm: str | None = None,
        hops: float | str = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.graph = graph
        self.hops = parse_hops(hops)
        self.with_importance = False

    @classmethod
    def choose(
        cls, graph: str = 'landmark', norm: str | None = None, **kwargs: Any
    ) -> type[InfSAAttention]:
        if cls is not NeumannInfSA:
            return cls
        if graph == 'landmark':
            if norm not in (None, 'row'):
                raise ValueError(
                    f"graph='landmark' is a Markov chain by itself and takes "
                    f'no norm={norm!r}'
                )
            return LandmarkInfSA
        if graph not in FEATURE_MAPS:
            raise ValueError(
                f'graph={graph!r} is unknown; choose one of '
                f'{["landmark", *FEATURE_MAPS]}'
            )
        if norm in (None, 'frobenius'):
            return FrobeniusInfSA
        if norm != 'row':
            raise ValueError(
                f"norm={norm!r} is unknown; choose 'frobenius' or 'row'"
            )
        if graph == 'identity':
            raise ValueError(
                "graph='identity' is signed: its rows have no sum to be "
                "divided by; use norm='frobenius'"
            )
        return RowInfSA

    def attend(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, NeumannContext)
        assert context.readout is not None
        q = self.queries(x.flatten(1, -2))
        with no_autocast(x.device):
            phi_q = self._query_factors(q, context)
            out = neumann.attend(phi_q, context.readout, context.fallback)
        return self.join_heads(out.to(x.dtype)).view(x.shape)

    def importance(
        self, x: Tensor, context: Context, valid: Tensor | None = None
    ) -> Tensor:
        """How much each token receives from all, (B, H, N); sums to one.

        PageRank of a Markov chain with more hops than one, the mean attention
        received with one, Katz centrality under the Frobenius norm.

        Args:
            x: a band, (B, ..., C).
            context: of the last phase, with ``with_importance`` set before
                the first.
            valid: (B, ...) bool.
        """
        assert isinstance(context, NeumannContext)
        assert context.num_tokens is not None
        x, valid = flat(x, valid)
        k = self.keys(x)
        with no_autocast(x.device):
            phi_k = self._key_factors(k, context)
            return self._importance(phi_k, context, context.num_tokens, valid)

    def _importance(
        self,
        phi_k: Tensor,
        context: NeumannContext,
        num_queries: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        assert context.weights is not None, 'with_importance was not set'
        discount = self.discount if self.hops != 1 else None
        return neumann.importance(
            phi_k, context.weights, num_queries, discount, valid
        )

    @abc.abstractmethod
    def _query_factors(self, q: Tensor, context: NeumannContext) -> Tensor:
        """(B, H, N, M) of the projected queries."""

    @abc.abstractmethod
    def _key_factors(self, k: Tensor, context: Context) -> Tensor:
        """(B, H, N, M) of the projected keys."""

    def _need_square(self, q: Tensor, k: Tensor) -> None:
        if self.hops != 1 and q.shape[2] != k.shape[2]:
            raise ValueError(
                f'hops={self.hops:g} walks from token to token and needs as '
                f'many queries ({q.shape[2]}) as keys ({k.shape[2]})'
            )


class LandmarkInfSA(NeumannInfSA):
    """A Markov chain over the tokens that passes learned landmarks.

    Args:
        *args, **kwargs: as for :class:`NeumannInfSA`. With one hop there is
            no discount. Only the direction of a key counts, so that a
            ``key_recurrence`` would change nothing and is refused.
        num_landmarks: M.
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
        *args: Any,
        num_landmarks: int = 32,
        log_n: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.recurrence is not None:
            raise ValueError(
                "graph='landmark' sees the direction of a key only, which a "
                'key_recurrence does not change'
            )
        self.log_n = log_n
        self.num_landmarks = num_landmarks
        self.landmarks = nn.Parameter(
            torch.empty(self.num_heads, num_landmarks, self.head_dims)
        )
        self.log_temperature = nn.Parameter(torch.empty(self.num_heads))
        self.num_tokens_ref: Tensor
        self.register_buffer(
            'num_tokens_ref', torch.empty((), dtype=torch.long)
        )
        if self.hops == 1:
            self.discount_logit = None
        LandmarkInfSA.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.landmarks)
        nn.init.constant_(self.log_temperature, math.log(10.0))
        self.num_tokens_ref.zero_()

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> NeumannState:
        m, heads = self.num_landmarks, (batch, self.num_heads)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*heads, *shape, device=device)

        walks = self.hops != 1
        return NeumannState(
            key_value=zeros(m, self.head_dims),
            count=torch.zeros(batch, device=device),
            key_mass=zeros(m),
            query_mass=zeros(m) if walks or self.with_importance else None,
            key_query=zeros(m, m) if walks else None,
        )

    def accumulate(
        self,
        x: Tensor,
        state: NeumannState,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> NeumannState:
        x, valid = flat(x, valid)
        k, v = self.keys(x), self.values(x)
        walks = self.hops != 1 or self.with_importance
        q = self.queries(x) if walks else None
        with no_autocast(x.device):
            phi_k = self._key_factors(k, context)
            phi_q = None if q is None else self._query_factors(q, context)
            return state.merge(
                neumann.sum_chain(phi_k, v, valid, phi_q, self.hops)
            )

    def finalize(
        self, state: NeumannState, phase: int, context: Context
    ) -> NeumannContext:
        discount = self.discount if self.hops != 1 else None
        with no_autocast(state.key_value.device):
            result = NeumannContext(
                context.num_tokens,
                neumann.read_chain(state, discount, self.hops),
            )
            if self.with_importance:
                result.weights = neumann.chain_importance(
                    state, discount, self.hops
                )
        return result

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._need_square(q, k)
        discount = self.discount if self.hops != 1 else None
        with no_autocast(q.device):
            context = NeumannContext(count_tokens(k, valid))
            phi_q = self._query_factors(q, context)
            phi_k = self._key_factors(k, context)
            state = neumann.sum_chain(
                phi_k, v, valid, phi_q, self.hops, query_valid
            )
            readout = neumann.read_chain(state, discount, self.hops)
            out = neumann.attend(phi_q, readout)
            if not need_weights:
                return out, None
            context.weights = neumann.chain_importance(
                state, discount, self.hops
            )
            num_queries = count_tokens(q, query_valid)
            return out, self._importance(phi_k, context, num_queries, valid)

    def _query_factors(self, q: Tensor, context: Context) -> Tensor:
        return landmark_queries(q, self.landmarks, self._temperature(context))

    def _key_factors(self, k: Tensor, context: Context) -> Tensor:
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


class _FeatureInfSA(NeumannInfSA):
    """What the two norms of a feature graph share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.feature, widening = FEATURE_MAPS[self.graph]
        self.factor_dims = widening * self.head_dims

    def _query_factors(self, q: Tensor, context: NeumannContext) -> Tensor:
        return self.feature(q)

    def _key_factors(self, k: Tensor, context: Context) -> Tensor:
        return self.feature(k)


class FrobeniusInfSA(_FeatureInfSA):
    """A feature graph divided by its Frobenius norm.

    Args:
        *args, **kwargs: as for :class:`NeumannInfSA`.

    Attributes:
        num_dead: int64 scalar, how often in training a head had no edge at
            all and fell back to the mean. Not saved.
    """

    num_phases = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_dead: Tensor
        self.register_buffer(
            'num_dead', torch.empty((), dtype=torch.long), persistent=False
        )
        FrobeniusInfSA.reset_parameters(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.num_dead.zero_()

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> NeumannState:
        m, heads = self.factor_dims, (batch, self.num_heads)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*heads, *shape, device=device)

        return NeumannState(
            key_value=zeros(m, self.head_dims),
            count=torch.zeros(batch, device=device),
            key_mass=zeros(m),
            query_mass=zeros(m),
            key_query=zeros(m, m) if self.hops != 1 else None,
            query_query=zeros(m, m),
            key_key=zeros(m, m),
            plain=zeros(self.head_dims),
        )

    def accumulate(
        self,
        x: Tensor,
        state: NeumannState,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> NeumannState:
        x, valid = flat(x, valid)
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        with no_autocast(x.device):
            phi_q, phi_k = self.feature(q), self.feature(k)
            return state.merge(
                neumann.sum_graph(phi_q, phi_k, v, valid, self.hops)
            )

    def finalize(
        self, state: NeumannState, phase: int, context: Context
    ) -> NeumannContext:
        with no_autocast(state.key_value.device):
            return self._read(state, context, self.with_importance)

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._need_square(q, k)
        with no_autocast(q.device):
            phi_q, phi_k = self.feature(q), self.feature(k)
            state = neumann.sum_graph(
                phi_q, phi_k, v, valid, self.hops, query_valid
            )
            context = self._read(state, Context(), need_weights)
            assert context.readout is not None
            out = neumann.attend(phi_q, context.readout, context.fallback)
            if not need_weights:
                return out, None
            return out, self._importance(phi_k, context, state.count, valid)

    def _read(
        self, state: NeumannState, context: Context, with_importance: bool
    ) -> NeumannContext:
        readout, fallback = neumann.read_graph(state, self.discount, self.hops)
        if self.training:
            self.num_dead += neumann.dead_graphs(state).sum()
        result = NeumannContext(context.num_tokens, readout, fallback)
        if with_importance:
            if self.graph == 'identity':
                raise ValueError(
                    "graph='identity' is signed and ranks no tokens; use "
                    "'crelu'"
                )
            result.weights, result.uniform = neumann.graph_importance(
                state, self.discount, self.hops
            )
        return result

    def _importance(
        self,
        phi_k: Tensor,
        context: NeumannContext,
        num_queries: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        assert context.weights is not None, 'with_importance was not set'
        assert context.uniform is not None
        shares = (phi_k @ context.weights[..., None]).squeeze(-1)
        return hide((shares + context.uniform)[..., None], valid).squeeze(-1)


class RowInfSA(_FeatureInfSA):
    """A feature graph with each row divided by its sum: a Markov chain.

    A token without any edge walks to all tokens alike.

    Args:
        *args, **kwargs: as for :class:`NeumannInfSA`. With one hop there is
            no discount, and one phase instead of two (unless an importance is
            asked for).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.hops == 1:
            self.discount_logit = None

    @property
    def num_phases(self) -> int:
        return 2 if self.hops != 1 or self.with_importance else 1

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> State:
        m, heads = self.factor_dims + 1, (batch, self.num_heads)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*heads, *shape, device=device)

        if phase == 1:
            return WalkState(zeros(m), zeros(m, m) if self.hops != 1 else None)
        return NeumannState(
            key_value=zeros(m, self.head_dims),
            count=torch.zeros(batch, device=device),
            key_mass=zeros(m),
        )

    def accumulate(
        self,
        x: Tensor,
        state: State,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> State:
        x, valid = flat(x, valid)
        k = self.keys(x)
        if phase == 0:
            v = self.values(x)
            with no_autocast(x.device):
                phi_k = self._key_factors(k, context)
                return state.merge(neumann.sum_rows(phi_k, v, valid))
        assert isinstance(context, NeumannContext)
        q = self.queries(x)
        with no_autocast(x.device):
            rows = self._query_factors(q, context)
            phi_k = self._key_factors(k, context)
            return state.merge(neumann.sum_walk(rows, phi_k, valid, self.hops))

    def finalize(
        self, state: State, phase: int, context: Context
    ) -> NeumannContext:
        if phase == 0:
            assert isinstance(state, NeumannState)
            result = NeumannContext(
                context.num_tokens,
                key_mass=state.key_mass,
                key_value=state.key_value,
            )
            if self.hops == 1:
                result.readout = state.key_value
            return result
        assert isinstance(state, WalkState)
        assert isinstance(context, NeumannContext)
        with no_autocast(state.query_mass.device):
            return self._walk(state, context)

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        self._need_square(q, k)
        with no_autocast(q.device):
            phi_k = self._key_factors(k, Context())
            state = neumann.sum_rows(phi_k, v, valid)
            context = self.finalize(state, 0, Context())
            rows = self._query_factors(q, context)
            if self.hops != 1 or need_weights:
                walk = neumann.sum_walk(
                    rows, phi_k, valid, self.hops, query_valid
                )
                context = self._walk(walk, context)
            assert context.readout is not None
            out = neumann.attend(rows, context.readout)
            if not need_weights:
                return out, None
            num_queries = count_tokens(q, query_valid)
            return out, self._importance(phi_k, context, num_queries, valid)

    def _walk(
        self, walk: WalkState, context: NeumannContext
    ) -> NeumannContext:
        discount = self.discount if self.hops != 1 else None
        assert context.key_value is not None
        return dataclasses.replace(
            context,
            readout=neumann.read_rows(
                context.key_value, walk, discount, self.hops
            ),
            weights=neumann.row_importance(walk, discount, self.hops),
        )

    def _query_factors(self, q: Tensor, context: NeumannContext) -> Tensor:
        assert context.key_mass is not None
        return neumann.row_queries(self.feature(q), context.key_mass)

    def _key_factors(self, k: Tensor, context: Context) -> Tensor:
        return neumann.with_teleport(self.feature(k))
