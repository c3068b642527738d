# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The sum of the cross-entropy of all pixels, in strips.

It is a plain sum, so value and gradient come from one walk, and nothing has
to be computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .ohem import Border, entropy, pixel_weight
from .strips import PixelCounts, Strips, count_pixels


@dataclasses.dataclass
class EntropyCounts(PixelCounts):
    """What bands and ranks add up beside the cross-entropy.

    Attributes:
        weight: float64 (B,), sum of the weights of the pixels that count.
    """

    weight: Tensor


def sum_cross_entropy(
    logits: Tensor,
    strips: Strips,
    class_weight: Tensor | None = None,
    border: Border | None = None,
) -> tuple[Tensor, EntropyCounts]:
    """Resize logits to pixels and sum their cross-entropy.

    Args:
        logits: (B, classes, height, width), a part of the coarse grid.
        strips: the pixels.
        class_weight: (classes,) in the dtype of sums; None for ones.
        border: between easy pixels and hard ones, which alone count; None
            to count all.

    Returns:
        The sum of weight times cross-entropy, float64 (), and constants to
        go with it.
    """
    loss, counts = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, strips, class_weight, border
    )
    return loss, EntropyCounts(*counts)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        strips: Strips,
        class_weight: Tensor | None,
        border: Border | None,
    ) -> tuple[Tensor, Tensor]:
        # Terms of millions of pixels: in float64.
        loss = logits.new_zeros((), dtype=torch.float64)
        counts = logits.new_zeros(3, logits.shape[0], dtype=torch.float64)
        differentiate = ctx.needs_input_grad[0]

        def visit(
            scores: Tensor, label: Tensor, valid: Tensor
        ) -> Tensor | None:
            counts[:2] += count_pixels(scores, label, valid)
            missed = entropy(scores, label)
            weight = pixel_weight(scores, label, class_weight)
            if border is not None:
                valid = valid & border.is_hard(missed, weight)
            weight = weight.masked_fill(~valid, 0)
            counts[2] += weight.flatten(1).sum(1, dtype=torch.float64)
            missed.masked_fill_(~valid, 0).mul_(weight)
            loss.add_(missed.sum(dtype=torch.float64))
            if not differentiate:
                return None
            # The gradient of the scores, in their own place.
            slope, at = scores.exp_(), label[:, None]
            minus = slope.new_full((), -1).expand(at.shape)
            return slope.scatter_add_(1, at, minus).mul_(weight[:, None])

        gradient = strips.walk(logits, visit, differentiate)
        if gradient is not None:
            ctx.save_for_backward(gradient.to(logits.dtype))
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * slope.to(gradient.dtype), *(None,) * 3
