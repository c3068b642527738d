# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A transformer block as two residual branches, one global and one local."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infsa_seg.ops import Context

from .protocol import GlobalOp, Halo, Merge, identity, zero_rows


class GlobalBranch(nn.Module):
    """``x + drop_path(op(norm(x)))`` with a global operation.

    It offers the operation's own verbs, so an executor can drive it; see
    :class:`infsa_seg.layers.protocol.GlobalOp` for their arguments. With an
    operation that is not mergeable it has no ``num_phases``.
    """

    op: GlobalOp

    def __init__(
        self, norm: nn.Module, op: nn.Module, drop_path: nn.Module
    ) -> None:
        super().__init__()
        self.norm = norm
        self.add_module('op', op)
        self.drop_path = drop_path

    @property
    def num_phases(self) -> int:
        return self.op.num_phases

    def init_state(self, batch: int, phase: int, device: torch.device) -> Any:
        return self.op.init_state(batch, phase, device)

    def accumulate(
        self,
        x: Tensor,
        state: Any,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> Any:
        return self.op.accumulate(self.norm(x), state, phase, context, valid)

    def finalize(self, state: Any, phase: int, context: Context) -> Context:
        return self.op.finalize(state, phase, context)

    def importance(
        self, x: Tensor, context: Context, valid: Tensor | None = None
    ) -> Tensor:
        """How much each token of a band receives from all, (B, H, N).

        Raises:
            AttributeError: the operation has no such notion.
        """
        return self.op.importance(self.norm(x), context, valid)  # type: ignore[attr-defined]

    def attend(self, x: Tensor, context: Context) -> Tensor:
        return x + self.drop_path(self.op.attend(self.norm(x), context))

    def forward(
        self,
        x: Tensor,
        merge: Merge = identity,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """The same, normalising once; (B, ..., C) to the same shape."""
        y = self.op(self.norm(x), merge=merge, valid=valid, context=context)
        return x + self.drop_path(y)


class LocalBranch(nn.Module):
    """``x + drop_path(op(norm(x)))`` with a local operation.

    Attributes:
        halo: rows of context on each side, that of the operation.
    """

    def __init__(
        self, norm: nn.Module, op: nn.Module, drop_path: nn.Module
    ) -> None:
        super().__init__()
        self.norm = norm
        self.op = op
        self.drop_path = drop_path
        self.halo = int(op.halo)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        halo: Halo = zero_rows,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the band's output, (B, rows, columns, C).

        Args:
            x: the band, (B, rows, columns, C).
            halo: gives the rows around it.
            valid: mask of the band together with the rows that ``halo``
                gives; None for all.
        """
        grown, above = x, 0
        if self.halo:
            upper, lower = halo(x, self.halo)
            above = upper.shape[1]
            grown = torch.cat([upper, x, lower], 1)
        y = self.op(self.norm(grown), valid)
        return x + self.drop_path(y.narrow(1, above, x.shape[1]))


class Block(nn.Module):
    """Attention (or none, for comparison), then a feed-forward network.

    Args:
        attn: global branch, or None.
        ffn: local branch.
    """

    def __init__(self, attn: GlobalBranch | None, ffn: LocalBranch) -> None:
        super().__init__()
        self.attn = attn
        self.ffn = ffn

    def steps(self) -> Iterator[GlobalBranch | LocalBranch]:
        """The block as a flat list of operations, in order."""
        if self.attn is not None:
            yield self.attn
        yield self.ffn

    def forward(
        self,
        x: Tensor,
        merge: Merge = identity,
        halo: Halo = zero_rows,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """(B, rows, columns, C) to the same shape; see the branches."""
        if self.attn is not None:
            x = self.attn(x, merge=merge, valid=valid, context=context)
        return self.ffn(x, halo=halo, valid=valid)
