# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The sums over pixels that the Dice loss is made of, in strips.

The loss is no sum itself: its gradient at a pixel needs the finished sums.
So one walk adds them up, and a second one, in the backward pass, resizes
again and follows the gradients of the sums to the coarse logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from infsa_seg.ops import sum_dtype

from .strips import PixelCounts, Strips, count_pixels


@dataclasses.dataclass
class DiceSums(PixelCounts):
    """What bands and ranks add up, in float64.

    Attributes:
        overlap: (B, classes), probability of each class in its own pixels.
        mass: (B, classes), probability of each class, or its square, in all
            pixels; not in ignored ones.
        target: (B, classes), pixels of each class.
        parts: (B,), a one of each part: how many there are.
    """

    overlap: Tensor
    mass: Tensor
    target: Tensor
    parts: Tensor


def sum_overlaps(logits: Tensor, strips: Strips, squared: bool) -> DiceSums:
    """Resize logits to pixels and sum their probabilities.

    Args:
        logits: (B, classes, height, width), a part of the coarse grid.
        strips: the pixels.
        squared: sum the squares as ``mass``.

    Returns:
        The sums of one part; ``overlap`` and ``mass`` can be differentiated.
    """
    sums, target, counts = _Overlaps.apply(  # type: ignore[no-untyped-call]
        logits, strips, squared
    )
    return DiceSums(
        correct=counts[0],
        valid=counts[1],
        overlap=sums[0],
        mass=sums[1],
        target=target,
        parts=torch.ones_like(counts[0]),
    )


def dice_loss(
    overlap: Tensor, mass: Tensor, target: Tensor, eps: float, squared: bool
) -> Tensor:
    """Mean of 1 - Dice over the entries that have target pixels.

    Args:
        overlap, mass, target: of one shape, as in :class:`DiceSums`.
        eps: keeps the quotient from 0 / 0.
        squared: ``mass`` is that of squares.

    Returns:
        (), zero where no entry has target pixels.
    """
    absent = target == 0
    share, whole = 2 * overlap, mass + target + eps
    if squared:
        whole = whole + eps
    else:
        share = share + eps
    # Filled before the division: 0 / 0 would have no gradient.
    dice = share / whole.masked_fill(absent, 1)
    loss = (1 - dice).masked_fill(absent, 0).sum()
    return loss / (~absent).sum().clamp(min=1)


class _Overlaps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, strips: Strips, squared: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, num_classes = logits.shape[:2]
        # Terms of millions of pixels: in float64.
        sums = logits.new_zeros(2, batch, num_classes, dtype=torch.float64)
        target = torch.zeros_like(sums[0])
        counts = logits.new_zeros(2, batch, dtype=torch.float64)

        def visit(scores: Tensor, label: Tensor, valid: Tensor) -> None:
            counts.add_(count_pixels(scores, label, valid))
            share = scores.exp_().masked_fill_(~valid[:, None], 0)
            at = label[:, None]
            own = torch.zeros_like(share)
            own.scatter_(1, at, share.gather(1, at))
            sums[0] += _over_pixels(own)
            own.scatter_(1, at, valid[:, None].to(own.dtype))
            target.add_(_over_pixels(own))
            sums[1] += _over_pixels(share.square_() if squared else share)

        strips.walk(logits, visit)
        ctx.strips, ctx.squared = strips, squared
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(target, counts)
        return sums, target, counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, slopes: Tensor, _: Tensor, __: Tensor
    ) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        of_overlap, of_mass = slopes.to(sum_dtype(logits.dtype))

        def visit(scores: Tensor, label: Tensor, valid: Tensor) -> Tensor:
            share, at = scores.exp_(), label[:, None]
            # The gradient of the probabilities, then that of their logits.
            if ctx.squared:
                slope = 2 * of_mass[:, :, None, None] * share
            else:
                slope = of_mass[:, :, None, None].expand_as(share).clone()
            own = of_overlap.gather(1, label.flatten(1)).view(at.shape)
            slope.scatter_add_(1, at, own).mul_(share)
            slope.sub_(share.mul_(slope.sum(1, keepdim=True)))
            return slope.masked_fill_(~valid[:, None], 0)

        gradient = ctx.strips.walk(logits, visit, differentiate=True)
        return gradient.to(logits.dtype), None, None


def _over_pixels(x: Tensor) -> Tensor:
    return x.sum((2, 3), dtype=torch.float64)
