# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A network as the passes over its tokens that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from infsa_seg.layers.protocol import GlobalOp, LocalOp, Step, Tap


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One pass over all bands.

    Attributes:
        embeds: tokens are made from pixels, not taken from the store.
        steps: what each band goes through first; a global operation can only
            be the first of them, its state being complete.
        gather: the global operation that the bands are then added up for.
        phase: which of its phases.
        is_last: whether nobody asks for the tokens after it.
    """

    embeds: bool
    steps: tuple[Step, ...]
    gather: GlobalOp | None = None
    phase: int = 0
    is_last: bool = False

    @property
    def halo(self) -> int:
        """Rows on each side of a band that its steps use up."""
        return sum(s.halo for s in self.steps if isinstance(s, LocalOp))

    @property
    def changes_tokens(self) -> bool:
        """Whether the tokens after it are others than before."""
        if self.gather is None or self.is_last:
            return False
        return self.embeds or bool(self.steps)

    @property
    def has_taps(self) -> bool:
        """Whether the decoder is fed from it."""
        return any(isinstance(step, Tap) for step in self.steps)


def split_sweeps(steps: Iterable[Step]) -> list[Sweep]:
    """Cut a network before every phase of its global operations.

    The sweep that applies an operation also gathers the first phase of the
    next one, so that L operations of p phases take pL + 1 sweeps. One that
    the network ends with is gathered and not applied.
    """
    sweeps: list[Sweep] = []
    pending: list[Step] = []
    for step in steps:
        if isinstance(step, GlobalOp):
            sweeps.append(Sweep(not sweeps, tuple(pending), step))
            sweeps += [
                Sweep(False, (), step, phase)
                for phase in range(1, step.num_phases)
            ]
            pending = []
        pending.append(step)
    if sweeps and pending == [sweeps[-1].gather]:
        return [*sweeps[:-1], dataclasses.replace(sweeps[-1], is_last=True)]
    return [*sweeps, Sweep(not sweeps, tuple(pending))]
