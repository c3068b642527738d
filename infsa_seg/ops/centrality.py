# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Centralities and random walks of a token graph (DESIGN 3.5).

S_ij >= 0 is the weight with which token i attends to token j, so a function
of ``graph`` says how strongly a token gives, and the same function of
``graph.T`` how strongly it receives. How they hang together:

* Katz centrality is the Neumann series with b = 1;
* as alpha grows to 1 / rho(S), Katz turns towards the dominant eigenvector,
  with an angle in proportion to 1 - alpha rho(S);
* with P = D^-1 S in place of S and the discount in place of alpha, the series
  counts the visits of a walk that ends with probability 1 - discount at each
  step: row i of the fundamental matrix for a walk from i;
* where such a walk ends is personalised PageRank, if every token has a way
  out; tokens without one ("dangling") end the walk, or, in PageRank, send it
  on.

Every formula stands here once. It sees a graph as two maps, S = lift lower,
and works on core = lower lift, which has the same non-zero eigenvalues. That
is S itself for a :class:`DenseGraph`, but M x M for a :class:`FactorGraph`,
where all but the fundamental matrix is linear in N.

Shapes: ... batch (as a rule B, H), N tokens, M width of the factors, D number
of columns. Results are float32 or better and, unless noted, differentiable.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .solve import solve
from .state import sum_dtype

GraphT = TypeVar('GraphT', bound='Graph')


class Graph(abc.ABC):
    """Base of both: S as the maps ``lower``, then ``lift``."""

    @abc.abstractmethod
    def lower(self, x: Tensor) -> Tensor:
        """From tokens, (..., N, D), to where the core acts, (..., M, D)."""

    @abc.abstractmethod
    def lift(self, x: Tensor) -> Tensor:
        """And back, (..., M, D) to (..., N, D)."""

    @abc.abstractmethod
    def core(self) -> Tensor:
        """``lower lift`` as a matrix, (..., M, M)."""

    @property
    @abc.abstractmethod
    def T(self) -> Graph:
        """The graph of S^T: every edge turned round."""

    @abc.abstractmethod
    def divide_rows(self: GraphT, norm: Tensor) -> GraphT:
        """``S / norm``, norm (..., N, 1)."""

    @abc.abstractmethod
    def add_outer(self: GraphT, left: Tensor, right: Tensor) -> GraphT:
        """``S + left right^T``, both (..., N, 1)."""

    @abc.abstractmethod
    def is_nonnegative(self) -> bool:
        """Whether no weight is negative; factors must not be, each by itself.

        That a product of signed factors happens to be non-negative cannot be
        seen in O(N M).
        """

    @property
    @abc.abstractmethod
    def ones(self) -> Tensor:
        """(..., N, 1), in the graph's dtype and on its device."""

    def apply(self, x: Tensor) -> Tensor:
        """``S x``, (..., N, D)."""
        return self.lift(self.lower(x))

    def degree(self) -> Tensor:
        """Row sums, (..., N, 1)."""
        return self.apply(self.ones)

    def dead_ends(self) -> Tensor:
        """(..., N, 1) bool: the row is zero, or too small to divide by."""
        degree = self.degree()
        return degree < torch.finfo(degree.dtype).tiny


@dataclasses.dataclass
class DenseGraph(Graph):
    """A graph given by its matrix; lower is the identity, core is S.

    Attributes:
        matrix: S, (..., N, N), cast to float32 or better.
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        shape = self.matrix.shape
        if len(shape) < 2 or shape[-1] != shape[-2]:
            raise ValueError(f'S must be (..., N, N), got {tuple(shape)}')
        self.matrix = self.matrix.to(sum_dtype(self.matrix.dtype))

    def lower(self, x: Tensor) -> Tensor:
        return x

    def lift(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def core(self) -> Tensor:
        return self.matrix

    @property
    def T(self) -> DenseGraph:
        return DenseGraph(self.matrix.mT)

    def divide_rows(self, norm: Tensor) -> DenseGraph:
        return DenseGraph(self.matrix / norm)

    def add_outer(self, left: Tensor, right: Tensor) -> DenseGraph:
        return DenseGraph(self.matrix + left * right.mT)

    def is_nonnegative(self) -> bool:
        return not bool((self.matrix < 0).any())

    @property
    def ones(self) -> Tensor:
        return torch.ones_like(self.matrix[..., :1])


@dataclasses.dataclass
class FactorGraph(Graph):
    """S = phi_q phi_k^T, of which the N x N matrix is never formed.

    Attributes:
        phi_q, phi_k: (..., N, M), cast to float32 or better; rows of masked
            tokens zero, as :func:`~infsa_seg.ops.tokens.hide` leaves them.
    """

    phi_q: Tensor
    phi_k: Tensor

    def __post_init__(self) -> None:
        shapes = self.phi_q.shape, self.phi_k.shape
        if len(shapes[0]) < 2 or shapes[0] != shapes[1]:
            raise ValueError(
                'phi_q and phi_k must both be (..., N, M), got '
                f'{tuple(shapes[0])} and {tuple(shapes[1])}'
            )
        dtype = torch.promote_types(self.phi_q.dtype, self.phi_k.dtype)
        self.phi_q = self.phi_q.to(sum_dtype(dtype))
        self.phi_k = self.phi_k.to(sum_dtype(dtype))

    def lower(self, x: Tensor) -> Tensor:
        return self.phi_k.mT @ x

    def lift(self, x: Tensor) -> Tensor:
        return self.phi_q @ x

    def core(self) -> Tensor:
        return self.phi_k.mT @ self.phi_q

    @property
    def T(self) -> FactorGraph:
        return FactorGraph(self.phi_k, self.phi_q)

    def divide_rows(self, norm: Tensor) -> FactorGraph:
        return FactorGraph(self.phi_q / norm, self.phi_k)

    def add_outer(self, left: Tensor, right: Tensor) -> FactorGraph:
        return FactorGraph(
            torch.cat([self.phi_q, left], -1),
            torch.cat([self.phi_k, right], -1),
        )

    def is_nonnegative(self) -> bool:
        return not bool((self.phi_q < 0).any() or (self.phi_k < 0).any())

    @property
    def ones(self) -> Tensor:
        return self.phi_q.new_ones(*self.phi_q.shape[:-1], 1)


def neumann_series(
    graph: Graph, b: Tensor, alpha: Tensor | float, hops: float = math.inf
) -> Tensor:
    """``sum_{t=1..T} (alpha S)^t b``, without the term b itself.

    In closed form, ``((I - alpha S)^-1 - I) b``, for infinitely many hops.

    Args:
        graph: S, of any sign.
        b: (..., N, D).
        alpha: a number, or a tensor that broadcasts to the batch.
        hops: T, a positive integer or ``math.inf``.

    Returns:
        (..., N, D).

    Raises:
        ValueError: if the infinite series diverges, alpha rho(S) >= 1 (to
            rounding), or an argument does not fit.
    """
    gain = _per_graph(alpha, graph)
    b = b.to(gain.dtype)
    if b.dim() < 2 or b.shape[-2] != graph.ones.shape[-2]:
        raise ValueError(
            f'b must be (..., N, D) with N = {graph.ones.shape[-2]}, got '
            f'{tuple(b.shape)}'
        )
    if math.isinf(hops):
        _refuse_divergence(graph, gain)
        return _closed_series(graph, b, gain)
    if hops < 1 or hops != int(hops):
        raise ValueError(f'hops={hops} is no positive integer or math.inf')
    total = torch.zeros_like(b)
    for _ in range(int(hops)):
        total = gain * graph.apply(b + total)
    return total


def katz(graph: Graph, alpha: Tensor | float) -> Tensor:
    """Katz centrality ``((I - alpha S)^-1 - I) 1``, (..., N).

    The discounted number of walks of one or more steps that start at a token;
    of ``graph.T``, those that arrive. Arguments and errors as for
    :func:`neumann_series`.
    """
    return neumann_series(graph, graph.ones, alpha).squeeze(-1)


@torch.no_grad()
def eigenvector(graph: Graph, max_steps: int = 10_000) -> Tensor:
    """The dominant right eigenvector, by power iteration on the core.

    The left one, which is the importance that tokens receive, is that of
    ``graph.T``. Where several parts of a graph are equally strong it is the
    limit from a start of ones, as Katz centrality has it. Not differentiable.

    Args:
        graph: S, not negative.
        max_steps: when to give up. The error shrinks per step by
            ``(1 + |lambda_2| / rho) / 2`` or faster.

    Returns:
        (..., N), not negative, of unit length; zeros for a graph without
        edges.

    Raises:
        ValueError: if S has negative entries, or the iteration does not
            settle, as where there is no cycle or where two parts of nearly
            equal strength take too long to part.
    """
    _require_nonnegative(graph)
    core = graph.core()
    # What rounding leaves of the change in a step.
    settled = 4 * math.sqrt(core.shape[-1]) * torch.finfo(core.dtype).eps
    weights = _distribution(graph.lower(graph.degree()))
    for _ in range(max_steps):
        walked = _distribution(core @ weights)
        if bool(((walked - weights).abs().sum(-2) <= settled).all()):
            return F.normalize(
                _distribution(graph.lift(walked)), dim=-2
            ).squeeze(-1)
        # Half a step: in a periodic graph whole ones would swing for ever.
        weights = _distribution(weights + walked)
    raise ValueError(
        f'the power iteration has not settled within {max_steps} steps: the '
        'graph has no cycle, or two parts of nearly equal strength'
    )


def spectral_radius(graph: Graph) -> Tensor:
    """rho(S), the largest modulus of an eigenvalue, (...); S of any sign."""
    moduli = torch.linalg.eigvals(graph.core()).abs()
    # An empty graph has no eigenvalue and radius zero.
    return F.pad(moduli, (0, 1)).amax(-1)


def max_discount(graph: Graph, margin: float = 0.1) -> Tensor:
    """The largest alpha for which the series converges, less a margin.

    Args:
        graph: S, of any sign.
        margin: in [0, 1), the part that is given away.

    Returns:
        ``(1 - margin) / rho(S)``, (...); infinite where rho(S) is zero.

    Raises:
        ValueError: if the margin is outside [0, 1).
    """
    if not 0 <= margin < 1:
        raise ValueError(f'margin must be in [0, 1), got {margin}')
    return (1 - margin) / spectral_radius(graph)


def transition(graph: GraphT) -> GraphT:
    """The walk P = D^-1 S over the tokens, D the row sums.

    A row of zeros stays one: there the walk ends.

    Raises:
        ValueError: if S has negative entries.
    """
    _require_nonnegative(graph)
    return graph.divide_rows(
        graph.degree().masked_fill(graph.dead_ends(), math.inf)
    )


def fundamental_matrix(graph: Graph, discount: Tensor | float) -> Tensor:
    """``(I - discount P)^-1`` of the absorbing chain, (..., N, N).

    Entry (i, j) is how often a walk from i is expected to visit j before it
    is absorbed, its start included. For some rows of a large graph use
    :func:`expected_visits`, which is linear in N.

    Args:
        graph: S, not negative.
        discount: in [0, 1), the probability to walk on; a number, or a
            tensor that broadcasts to the batch.

    Raises:
        ValueError: if S has negative entries or the discount is outside
            [0, 1).
    """
    gain = _as_discount(discount, graph)
    eye = _eye(graph.ones)
    return eye + _closed_series(transition(graph), eye, gain)


def expected_visits(
    graph: Graph, discount: Tensor | float, start: Tensor
) -> Tensor:
    """How often a walk is expected to visit each token, (..., N).

    Args:
        graph, discount: as for :func:`fundamental_matrix`.
        start: (..., N), how many walks start at each token; a one at i and
            zeros elsewhere give row i of the fundamental matrix.
    """
    return _visits(
        transition(graph),
        _as_discount(discount, graph),
        _columns(start, graph, 'start'),
    ).squeeze(-1)


def absorption(
    graph: Graph, discount: Tensor | float, start: Tensor
) -> Tensor:
    """Where a walk ends, (..., N); sums to the sum of ``start``.

    Each visit ends the walk with probability ``1 - discount``, and for
    certain at a token whose row is zero. Arguments as for
    :func:`expected_visits`.
    """
    gain = _as_discount(discount, graph)
    chain = transition(graph)
    visits = _visits(chain, gain, _columns(start, graph, 'start'))
    leaves = 1 - gain.masked_fill(graph.dead_ends(), 0)
    return (visits * leaves).squeeze(-1)


def pagerank(
    graph: Graph,
    discount: Tensor | float = 0.85,
    personalization: Tensor | None = None,
    dangling: Tensor | None = None,
) -> Tensor:
    """PageRank: the share of time of a walk that restarts, (..., N).

    Solves ``pi = discount P^T pi + (1 - discount) restart``, in which a row
    of zeros is replaced by ``dangling``.

    Args:
        graph: S, not negative.
        discount: in [0, 1), the probability to walk on; a number, or a
            tensor that broadcasts to the batch.
        personalization: (..., N), where the walk restarts, in proportion;
            None for anywhere. The mask of valid tokens keeps it from padding.
        dangling: (..., N), where it goes from a row of zeros, in proportion;
            None to restart.

    Returns:
        Sums to one; zeros where ``personalization`` is all zero.

    Raises:
        ValueError: if anything is negative, of another shape, or the discount
            outside [0, 1).
    """
    gain = _as_discount(discount, graph)
    restart, onward = (
        _distribution(_columns(weights, graph, name, nonnegative=True))
        for name, weights in (
            ('personalization', personalization),
            ('dangling', personalization if dangling is None else dangling),
        )
    )
    stuck = graph.dead_ends().to(restart.dtype)
    chain = transition(graph).add_outer(stuck, onward)
    return (1 - gain).squeeze(-1) * _visits(chain, gain, restart).squeeze(-1)


def _closed_series(graph: Graph, b: Tensor, gain: Tensor) -> Tensor:
    """``((I - gain S)^-1 - I) b`` by one solve of the core's size."""
    core = gain * graph.core()
    # The ones bring all batch dimensions, or solve could take the columns of
    # one b for a batch of vectors.
    b = graph.lower(gain * graph.ones * b)
    return graph.lift(solve(_eye(core) - core, b))


def _visits(chain: Graph, gain: Tensor, start: Tensor) -> Tensor:
    return start + _closed_series(chain.T, start, gain)


def _distribution(x: Tensor) -> Tensor:
    """Divide (..., N, 1) by its sum; zeros stay zeros."""
    total = x.sum(-2, keepdim=True)
    return x / total.where(total > 0, 1)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-2], dtype=like.dtype, device=like.device)


def _per_graph(value: Tensor | float, graph: Graph) -> Tensor:
    """A number or a tensor over the batch, as (..., 1, 1)."""
    ones = graph.ones
    tensor = torch.as_tensor(value, dtype=ones.dtype, device=ones.device)
    return tensor[..., None, None]


def _as_discount(discount: Tensor | float, graph: Graph) -> Tensor:
    gain = _per_graph(discount, graph)
    if not bool(((gain >= 0) & (gain < 1)).all()):
        raise ValueError(f'the discount must be in [0, 1), got {discount}')
    return gain


def _columns(
    x: Tensor | None, graph: Graph, name: str, nonnegative: bool = False
) -> Tensor:
    """One weight per token, as (..., N, 1) over the whole batch."""
    ones = graph.ones
    if x is None:
        return ones
    if x.dim() < 1 or x.shape[-1] != ones.shape[-2]:
        raise ValueError(
            f'{name} must be (..., N) with N = {ones.shape[-2]}, got '
            f'{tuple(x.shape)}'
        )
    if nonnegative and bool((x < 0).any()):
        raise ValueError(f'{name} has negative entries')
    return x.to(ones.dtype)[..., None].expand_as(ones)


def _require_nonnegative(graph: Graph) -> None:
    if not graph.is_nonnegative():
        raise ValueError(
            'walks and dominant eigenvectors need a graph without negative '
            'weights (and, if factorised, without negative factors)'
        )


def _refuse_divergence(graph: Graph, gain: Tensor) -> None:
    with torch.no_grad():
        radius = spectral_radius(graph)[..., None, None]
        reach = gain.abs() * radius
        rounding = 8 * torch.finfo(reach.dtype).eps
        if not bool((reach < 1 - rounding).all()):
            raise ValueError(
                'the Neumann series diverges: alpha * rho(S) is '
                f'{reach.max().item():.6g} and must be below 1; '
                'max_discount(graph) gives an alpha that is safe'
            )
