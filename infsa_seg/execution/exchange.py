# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Rows that ranks send to their neighbours, and what the wire has carried."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infsa_seg.ops import Rows


@dataclasses.dataclass
class Volume:
    """What one rank has given to one kind of message.

    Attributes:
        calls: messages, or collectives.
        elements: numbers in them.
        bytes: their size.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, buffer: Tensor) -> None:
        """Count a buffer that is about to travel."""
        self.calls += 1
        self.elements += buffer.numel()
        self.bytes += buffer.numel() * buffer.element_size()


@dataclasses.dataclass
class Traffic:
    """What one rank has sent since the last :meth:`reset`.

    Gradients and recomputation count like the forward pass.

    Attributes:
        merges: buffers that were summed over the group.
        halos: rows that were sent to other ranks.
    """

    merges: Volume = dataclasses.field(default_factory=Volume)
    halos: Volume = dataclasses.field(default_factory=Volume)

    def reset(self) -> None:
        """Begin a new step."""
        self.merges, self.halos = Volume(), Volume()

    def add_merge(self, buffer: Tensor) -> None:
        """Count a buffer that is about to be summed."""
        self.merges.add(buffer)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of both kinds since the last :meth:`reset`."""
        return self.merges.bytes + self.halos.bytes


class Route(NamedTuple):
    """Who needs which rows of whom; rows are those of the whole image.

    Attributes:
        band: the rows of this rank.
        above, below: ranks and the rows that they have to send here, from
            the top.
        sends: ranks and the rows of this band that they need.
    """

    band: Rows
    above: list[tuple[int, Rows]]
    below: list[tuple[int, Rows]]
    sends: list[tuple[int, Rows]]


def find_route(bands: list[Rows], rank: int, n: int) -> Route:
    """Plan an exchange of ``n`` rows on each side of every band.

    A band lower than ``n`` rows is no obstacle: the rest comes from further
    ranks.

    Args:
        bands: of all ranks, which cover the image in order.
        rank: whose route.
        n: rows on each side, fewer at the border of the image.
    """
    total = bands[-1].stop

    def needs(who: int, of: int) -> Rows:
        grown, have = bands[who].grow(n, total), bands[of]
        return Rows(max(grown.start, have.start), min(grown.stop, have.stop))

    def peers(first: int, stop: int, mine: bool) -> list[tuple[int, Rows]]:
        pairs = [
            (peer, needs(rank, peer) if mine else needs(peer, rank))
            for peer in range(first, stop)
            if peer != rank
        ]
        return [(peer, rows) for peer, rows in pairs if rows.num_rows > 0]

    size = len(bands)
    return Route(
        bands[rank],
        peers(0, rank, True),
        peers(rank + 1, size, True),
        peers(0, size, False),
    )


def exchange_rows(
    x: Tensor,
    route: Route,
    group: dist.ProcessGroup | None,
    volume: Volume,
) -> tuple[Tensor, Tensor]:
    """Fetch the rows above and below a band; differentiable.

    All ranks of the group call it at the same place. The gradients of rows
    that were fetched go back to their owners.

    Args:
        x: the band, (B, rows, ...).
        route: of :func:`find_route`, the same exchange on all ranks.
        group: the ranks; None for all.
        volume: counts what is sent.

    Returns:
        (B, rows above, ...) and (B, rows below, ...).
    """
    if not (route.above or route.below or route.sends):
        return x[:, :0], x[:, :0]
    return _Exchange.apply(x, route, group, volume)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """One function on every rank, so that all graphs have one shape."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        route: Route,
        group: dist.ProcessGroup | None,
        volume: Volume,
    ) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.group, ctx.volume = route, group, volume
        ctx.shape = x.shape
        sends = [
            (peer, x[:, rows.within(route.band)]) for peer, rows in route.sends
        ]
        receives = [*route.above, *route.below]
        parts = _swap(x, sends, receives, group, volume)
        count = len(route.above)
        return (
            torch.cat([x[:, :0], *parts[:count]], 1),
            torch.cat([x[:, :0], *parts[count:]], 1),
        )

    @staticmethod
    def backward(
        ctx: Any, above: Tensor, below: Tensor
    ) -> tuple[Tensor, None, None, None]:
        route: Route = ctx.route
        sends = []
        for grad, pairs in ((above, route.above), (below, route.below)):
            start = 0
            for peer, rows in pairs:
                sends.append((peer, grad[:, start : start + rows.num_rows]))
                start += rows.num_rows
        parts = _swap(above, sends, route.sends, ctx.group, ctx.volume)
        result = above.new_zeros(ctx.shape)
        for (_, rows), part in zip(route.sends, parts, strict=True):
            result[:, rows.within(route.band)] += part
        return result, None, None, None


def _swap(
    like: Tensor,
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Rows]],
    group: dist.ProcessGroup | None,
    volume: Volume,
) -> list[Tensor]:
    """Send tensors and receive rows, at most one of each with every peer."""
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    parts = [
        like.new_empty(like.shape[0], rows.num_rows, *like.shape[2:])
        for _, rows in receives
    ]
    operations = []
    for peer, tensor in sends:
        tensor = tensor.contiguous()
        volume.add(tensor)
        rank = dist.get_global_rank(whole, peer)
        operations.append(dist.P2POp(dist.isend, tensor, rank, whole))
    for (peer, _), part in zip(receives, parts, strict=True):
        rank = dist.get_global_rank(whole, peer)
        operations.append(dist.P2POp(dist.irecv, part, rank, whole))
    requests = dist.batch_isend_irecv(operations)
    for request in requests:
        request.wait()
    return parts
