# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Cross-entropy at the size of the pixels, a piece of logits at a time.

The logits of all pixels never exist. Each piece is resized, scored and
differentiated at once; what is kept is the gradient of the coarse logits, so
that nothing has to be computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from infsa_seg.ops import (
    Axis,
    Rows,
    State,
    bands_of,
    resize_part,
    sum_dtype,
)

# Resized logits that are alive at once in the work on one piece: themselves,
# their slope, and what the resizing makes of both.
_COPIES = 6


@dataclasses.dataclass
class PixelCounts(State):
    """What bands and ranks add up beside the loss.

    Attributes:
        weight: (B,), sum of the weights of the pixels that are not ignored.
        correct: (B,), pixels rightly classified.
        valid: (B,), pixels that are not ignored.
    """

    weight: Tensor
    correct: Tensor
    valid: Tensor


def sum_cross_entropy(
    logits: Tensor,
    label: Tensor,
    down: Axis,
    across: Axis,
    first: tuple[int, int] = (0, 0),
    class_weight: Tensor | None = None,
    ignore_index: int = 255,
    max_logits: int = 2**23,
) -> tuple[Tensor, PixelCounts]:
    """Resize logits to the pixels of ``label`` and sum their cross-entropy.

    Args:
        logits: (B, classes, height, width), a part of the coarse grid.
        label: int64 (B, rows, columns), a part of the image.
        down, across: where the logits lie in it.
        first: pixel row and column of the image at which ``label`` begins.
        class_weight: (classes,); None for ones.
        ignore_index: label of pixels that do not count.
        max_logits: numbers of the size of resized logits that may exist at
            once, temporary ones included.

    Returns:
        The sum of weight times cross-entropy, (), and constants to go with
        it.

    Raises:
        ValueError: ``max_logits`` does not allow a single pixel.
        IndexError: a label is no class and not ``ignore_index``.
    """
    loss, counts = _Strips.apply(  # type: ignore[no-untyped-call]
        logits,
        label,
        (down, across),
        first,
        class_weight,
        ignore_index,
        max_logits,
    )
    return loss, PixelCounts(*counts)


def _pieces(
    label: Tensor, num_classes: int, max_logits: int
) -> Iterator[tuple[Rows, Rows]]:
    batch, height, width = label.shape
    pixels = max_logits // (_COPIES * batch * num_classes)
    if pixels < 1:
        raise ValueError(
            f'max_logits={max_logits} is less than one pixel of {batch} '
            f'images needs with {num_classes} classes, '
            f'{_COPIES * batch * num_classes}'
        )
    # Whole rows if they fit, for they lie side by side in memory.
    columns = min(width, pixels)
    for rows in bands_of(height, max(pixels // columns, 1)):
        for run in bands_of(width, columns):
            yield rows, run


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        label: Tensor,
        axes: tuple[Axis, Axis],
        first: tuple[int, int],
        class_weight: Tensor | None,
        ignore_index: int,
        max_logits: int,
    ) -> tuple[Tensor, Tensor]:
        batch, num_classes = logits.shape[:2]
        dtype = sum_dtype(logits.dtype)
        if class_weight is not None:
            class_weight = class_weight.to(logits.device, dtype)
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = torch.zeros_like(logits, dtype=dtype)
        # Terms of millions of pixels: in float64.
        loss = logits.new_zeros((), dtype=torch.float64)
        counts = logits.new_zeros(3, batch, dtype=torch.float64)
        for rows, columns in _pieces(label, num_classes, max_logits):
            target = label[:, slice(*rows), slice(*columns)]
            window = _source(axes, rows, columns, first)
            piece = logits[:, :, window.rows, window.columns].to(dtype)
            with torch.set_grad_enabled(gradient is not None):
                piece = piece.detach().requires_grad_(gradient is not None)
                fine = resize_part(piece, *window.axes, *window.pixels)
            scores = fine.detach().log_softmax(1)
            loss += F.nll_loss(
                scores,
                target,
                class_weight,
                ignore_index=ignore_index,
                reduction='sum',
            )
            valid = target != ignore_index
            safe = target.masked_fill(~valid, 0)
            weight = valid.to(dtype)
            if class_weight is not None:
                weight = class_weight[safe].masked_fill(~valid, 0)
            right = (scores.argmax(1) == target) & valid
            counts += torch.stack(
                [
                    x.flatten(1).sum(1, dtype=torch.float64)
                    for x in (weight, right, valid)
                ]
            )
            if gradient is None:
                continue
            # The gradient of the scores, in their own place.
            slope = scores.exp_()
            slope.scatter_add_(
                1,
                safe[:, None],
                slope.new_full((), -1).expand(safe[:, None].shape),
            )
            slope.mul_(weight[:, None])
            (grad,) = torch.autograd.grad(fine, piece, slope)
            gradient[:, :, window.rows, window.columns] += grad
        if gradient is not None:
            ctx.save_for_backward(gradient.to(logits.dtype))
        counts = counts.to(dtype)
        ctx.mark_non_differentiable(counts)
        return loss.to(dtype), counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * slope.to(gradient.dtype), *(None,) * 6


class _Window(NamedTuple):
    """The coarse logits that a piece looks at.

    Attributes:
        rows, columns: of the logits at hand.
        axes: where those lie in the whole.
        pixels: rows and columns of the image.
    """

    rows: slice
    columns: slice
    axes: tuple[Axis, Axis]
    pixels: tuple[Rows, Rows]


def _source(
    axes: tuple[Axis, Axis],
    rows: Rows,
    columns: Rows,
    first: tuple[int, int],
) -> _Window:
    pixels, slices, moved = [], [], []
    for axis, part, start in zip(axes, (rows, columns), first, strict=True):
        wanted = Rows(part.start + start, part.stop + start)
        source = axis.source(wanted)
        pixels.append(wanted)
        slices.append(
            slice(max(source.start - axis.first, 0), source.stop - axis.first)
        )
        moved.append(axis._replace(first=max(source.start, axis.first)))
    return _Window(
        slices[0],
        slices[1],
        (moved[0], moved[1]),
        (pixels[0], pixels[1]),
    )
