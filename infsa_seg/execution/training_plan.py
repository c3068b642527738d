# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a step of training takes on a rank, foreseen without doing it.

Activations are counted on tensors without contents, which go through the
network's own forward and backward pass; weights, gradients and optimizer are
arithmetic, as DeepSpeed 0.19.8 divides them. What kernels need for themselves
and what an allocator wastes is not in it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from infsa_seg.ops import Rows, split_rows

from .exchange import find_route
from .measure import Tracker


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes beside weights, gradients and optimizer.

    Attributes:
        kept: alive when the backward pass begins, input included.
        peak: the most alive at once in the whole step.
    """

    kept: int
    peak: int


def foresee_activations(
    module: nn.Module,
    step: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    half: bool = False,
) -> Activations:
    """Count what is alive in a forward and a backward pass.

    Args:
        module: the model; a copy without contents runs, in its mode.
        step: from that copy and the inputs to the loss.
        inputs: only their shapes and dtypes matter; they may be on the meta
            device.
        half: weights of half precision under autocast, as on a GPU.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        shadow = _without_contents(module, half)
        if half:
            normalise_in_float(shadow)
        weights = list(shadow.parameters())
        for weight in weights:
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)
        grads = [w.grad for w in weights if w.grad is not None]
        known = [*weights, *grads, *shadow.buffers()]
    # The mode itself ends here: small tensors of indices need contents.
    autocast = torch.autocast('cpu', torch.bfloat16, enabled=half)
    with Tracker(known) as tracker, autocast:
        blank = [weights[0].new_empty(x.shape, dtype=x.dtype) for x in inputs]
        loss = step(shadow, *blank)
        kept = tracker.alive
        loss.backward()  # type: ignore[no-untyped-call]
    return Activations(kept, tracker.peak)


def _without_contents(module: nn.Module, half: bool) -> nn.Module:
    """A copy of tensors without contents; weights are not copied for it."""
    memo: dict[int, Any] = {}
    exempt = {id(p) for norm in _norms(module) for p in norm.parameters()}
    for tensor in module.parameters():
        dtype = tensor.dtype
        if half and id(tensor) not in exempt:
            dtype = torch.bfloat16
        empty = torch.empty(tensor.shape, dtype=dtype)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad)
    for buffer in module.buffers():
        dtype = buffer.dtype
        if half and dtype.is_floating_point:
            dtype = torch.bfloat16
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=dtype)
    return copy.deepcopy(module, memo)


def normalise_in_float(module: nn.Module) -> None:
    """Let norms see float32, as autocast does on GPUs and not on CPUs.

    Args:
        module: its norms have weights in float32.
    """
    for norm in _norms(module):
        norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))


def _norms(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, nn.LayerNorm)]


class AbsentRanks:
    """Stands for a :class:`SpatialParallel` whose other ranks are not there.

    Args:
        size: of the group.
        rank: whose band runs.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def rows(self, num_rows: int) -> Rows:
        """See :class:`SpatialParallel`."""
        return split_rows(num_rows, self.size)[self.rank]

    def merge(self, state: Any) -> Any:
        """See :class:`SpatialParallel`."""
        return state

    def halo(self, x: Tensor, n: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """See :class:`SpatialParallel`."""
        route = find_route(split_rows(num_rows, self.size), self.rank, n)
        above, below = (
            sum(rows.num_rows for _, rows in pairs)
            for pairs in (route.above, route.below)
        )
        if not above + below:
            return x[:, :0], x[:, :0]
        return _Borders.apply(x, above, below)  # type: ignore[no-untyped-call]


class _Borders(torch.autograd.Function):
    """Rows that come from elsewhere; their gradients go away again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, above: int, below: int
    ) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        batch, _, *rest = x.shape
        return (
            x.new_empty(batch, above, *rest),
            x.new_empty(batch, below, *rest),
        )

    @staticmethod
    def backward(
        ctx: Any, above: Tensor, below: Tensor
    ) -> tuple[Tensor, None, None]:
        return above.new_zeros(ctx.shape), None, None


@dataclasses.dataclass(frozen=True)
class ZeroShares:
    """What a rank holds of the weights and what belongs to them, in bytes.

    Attributes:
        weights: that it keeps.
        gathered: weights of others, in the forward and the backward pass.
        gradients: that the backward pass leaves.
        optimizer: moments of Adam, and float32 masters of the weights where
            ZeRO or half precision asks for them.
        buffers: in which gradients are collected in the backward pass.
        held: between two steps, gradients of plain training aside.
        update: the most while the optimizer works.
        sent: by this rank in one step, gradients and weights.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    buffers: int
    held: int
    update: int
    sent: int

    @property
    def backward(self) -> int:
        """Bytes in the backward pass, activations aside."""
        return (
            self.weights
            + self.gathered
            + self.gradients
            + self.optimizer
            + self.buffers
        )


# DeepSpeed's default of zero_optimization.reduce_bucket_size, in numbers.
REDUCE_BUCKET = 500_000_000


def zero_shares(
    trained: int,
    frozen: int,
    ranks: int,
    stage: int,
    half: bool = False,
    bucket: int = REDUCE_BUCKET,
) -> ZeroShares:
    """Divide weights and what belongs to them over ranks, as DeepSpeed does.

    All ranks take part, those of a spatial group too. Collectives are counted
    as rings: a sum over R ranks sends 2 (R - 1) / R of a buffer, a gathering
    or a sum that stays divided (R - 1) / R.

    * Stage 0: everything on every rank, gradients are summed.
    * Stages 1 and 2: the optimizer is divided; in stage 2 the gradients too.
      Gradients are summed in full in both cases (each rank then drops what is
      not its own), and the new weights are gathered.
    * Stage 3: weights are divided too, and gathered for the forward and the
      backward pass. By default a network of less than a billion weights may
      stay gathered from one to the other: it is counted in full, and the
      second gathering too, so that memory and traffic are at most these.

    Adam works on a rank's share as one piece, and makes two copies of it.

    Args:
        trained, frozen: numbers of weights.
        ranks: R, of the whole job.
        stage: 0 to 3.
        half: weights and gradients take two bytes each, not four.
        bucket: numbers in the buffer in which gradients are collected; as
            large as it is, however small the network.

    Raises:
        ValueError: there is no such stage.
    """
    if stage not in range(4):
        raise ValueError(f'ZeRO has stages 0 to 3, not {stage}')
    width = 2 if half else 4
    total = width * (trained + frozen)
    once = width * trained * (ranks - 1) // ranks
    if stage == 0:
        gradients = width * trained
        optimizer = (12 if half else 8) * trained
        # In float32 for the masters, or in one piece for the sum.
        copies = 4 * trained if half or ranks > 1 else 0
        held = total + optimizer
        update = held + gradients + copies
        return ZeroShares(
            total, 0, gradients, optimizer, 0, held, update, 2 * once
        )
    share = -(-trained // ranks)
    optimizer, buffers = 12 * share, width * bucket
    if stage < 3:
        held = total + optimizer
        return ZeroShares(
            weights=total,
            gathered=0,
            gradients=width * (trained if stage == 1 else share),
            optimizer=optimizer,
            buffers=buffers,
            held=held,
            update=held + 12 * share,
            sent=3 * once,
        )
    weights = -(-total // ranks)
    held = weights + width * share + optimizer + buffers
    return ZeroShares(
        weights=weights,
        gathered=total,
        gradients=width * share,
        optimizer=optimizer,
        buffers=buffers,
        held=held,
        update=held + (12 if half else 16) * share,
        sent=3 * once,
    )
