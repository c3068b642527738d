# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a step of training sends over the wire, by formula."""

from __future__ import annotations

import dataclasses

import torch

from infsa_seg.layers.protocol import BandNetwork, GlobalOp, LocalOp
from infsa_seg.ops import split_rows

from .bands import Grid
from .exchange import find_route


@dataclasses.dataclass(frozen=True)
class Communication:
    """Numbers that one rank gives to one step, forward and backward.

    Attributes:
        ranks: of the spatial group, P.
        merges: in the buffers that are summed over the group.
        merge_calls: how many such buffers.
        halos: in the rows that are sent to other ranks.
        ulysses, ring: what softmax attention would send in the same layers,
            by exchanging heads for tokens (all-to-all) and by passing keys
            and values round. Their networks need the halos too.
    """

    ranks: int
    merges: int
    merge_calls: int
    halos: int
    ulysses: int
    ring: int

    @property
    def sent(self) -> int:
        """All that a rank sends: a ring sums a buffer in 2 (P - 1) / P."""
        return self.halos + 2 * self.merges * (self.ranks - 1) // self.ranks


def communication(
    network: BandNetwork,
    height: int,
    width: int,
    ranks: int,
    rank: int = 0,
    batch: int = 1,
    recompute: bool = False,
) -> Communication:
    """Count the numbers that one rank gives to one step of training.

    With n = N / P tokens of C channels on a rank and L layers:

    * a merge: the size of the state, which knows no N, once forward and once
      backward per phase; with ``recompute`` once more. The number of tokens
      of each image is summed once.
    * a halo: rows x columns x channels, likewise.
    * Ulysses: queries, keys, values and the output are exchanged,
      4 n C (P - 1) / P forward and as much backward.
    * ring attention: keys and values visit all ranks, 2 n C (P - 1) forward;
      backward their gradients travel with them, 4 n C (P - 1).

    Args:
        network: as :func:`infsa_seg.execution.spatial_forward` runs it, all
            of it trained. Only its steps are looked at.
        height, width: of the image in pixels.
        ranks: of the spatial group.
        rank: whose numbers.
        batch: images.
        recompute: layers are computed twice.
    """
    grid = Grid(height, width, network.patch_size)
    bands = split_rows(grid.rows, ranks)
    passes = 3 if recompute else 2
    merges, calls, halos, layers = 0, 0, 0, 0
    row = batch * grid.columns

    def exchanged(n: int, forwards: int) -> int:
        route = find_route(bands, rank, n)
        fetched = [*route.above, *route.below]
        return forwards * sum(r.num_rows for _, r in route.sends) + sum(
            r.num_rows for _, r in fetched
        )

    for step in network.steps():
        if isinstance(step, GlobalOp):
            layers += 1
            for phase in range(step.num_phases):
                state = step.init_state(batch, phase, torch.device('meta'))
                merges += passes * (state.nbytes // 4)
                calls += passes
        elif isinstance(step, LocalOp):
            width_sent = row * network.embed_dims
            halos += width_sent * exchanged(step.halo, passes - 1)
    halos += row * network.tap_dims * exchanged(network.halo, 1)
    tokens = batch * bands[rank].num_rows * grid.columns
    moved = layers * tokens * network.embed_dims
    again = 1 if recompute else 0
    if ranks > 1:
        # The number of tokens, which has no gradient.
        merges, calls = merges + batch, calls + 1
    else:
        merges, calls = 0, 0
    return Communication(
        ranks,
        merges,
        calls,
        halos,
        ulysses=(2 + again) * 4 * moved * (ranks - 1) // ranks,
        ring=(6 + 2 * again) * moved * (ranks - 1),
    )
