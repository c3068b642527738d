# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The walk over the pixels, a piece of resized logits at a time.

The logits of all pixels never exist. Each piece is resized and shown to a
loss, which answers with the slope of the piece; what is kept is the gradient
of the coarse logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from infsa_seg.ops import (
    Axis,
    Place,
    Rows,
    State,
    bands_of,
    resize_part,
    sum_dtype,
)

# Resized logits that are alive at once in the work on one piece: themselves,
# their slope, and what the resizing and the losses make of both.
_COPIES = 6

Visit = Callable[[Tensor, Tensor, Tensor], 'Tensor | None']


@dataclasses.dataclass
class PixelCounts(State):
    """What tells how good the classes are.

    Attributes:
        correct: float64 (B,), pixels rightly classified.
        valid: float64 (B,), pixels that are not ignored.
    """

    correct: Tensor
    valid: Tensor

    def accuracy(self) -> Tensor:
        """Percentage of right pixels, (1,); zero without a pixel."""
        return 100 * self.correct.sum(0, True) / self.valid.sum().clamp(min=1)


def count_pixels(scores: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    """The counts of a piece: float64 (2, B), as in :class:`PixelCounts`."""
    # As argmax, which takes four times as long on CPUs.
    right = (scores.max(1).indices == label) & valid
    return torch.stack(
        [x.flatten(1).sum(1, dtype=torch.float64) for x in (right, valid)]
    )


@dataclasses.dataclass(frozen=True)
class Strips:
    """The labelled pixels that coarse logits are resized to.

    Attributes:
        label: int64 (B, rows, columns), a part of the image.
        num_classes: of the logits.
        place: where the logits and the labels lie in the image.
        ignore_index: label of pixels that do not count.
        max_logits: numbers of the size of resized logits that may exist at
            once, temporary ones included.

    Raises:
        ValueError: ``max_logits`` does not allow a single pixel.
        ValueError: a label is no class and not ``ignore_index``.
    """

    label: Tensor
    num_classes: int
    place: Place
    ignore_index: int = 255
    max_logits: int = 2**23

    def __post_init__(self) -> None:
        batch, needed = self.label.shape[0], self._pixel
        if self.max_logits < needed:
            raise ValueError(
                f'max_logits={self.max_logits} is less than one pixel of '
                f'{batch} images needs with {self.num_classes} classes, '
                f'{needed}'
            )
        # Where memory is foreseen, labels have no contents.
        if not isinstance(self.label, FakeTensor):
            self._check_label()

    def _check_label(self) -> None:
        strange = (self.label < 0) | (self.label >= self.num_classes)
        strange &= self.label != self.ignore_index
        if strange.any():
            raise ValueError(
                f'label {int(self.label[strange][0])} is none of the '
                f'{self.num_classes} classes and not the ignored '
                f'{self.ignore_index}'
            )

    @property
    def _pixel(self) -> int:
        return _COPIES * self.label.shape[0] * self.num_classes

    def walk(
        self, logits: Tensor, visit: Visit, differentiate: bool = False
    ) -> Tensor | None:
        """Resize the logits piece by piece.

        Args:
            logits: (B, classes, height, width), a part of the coarse grid.
            visit: is called with each piece: the logarithms of the
                probabilities, (B, classes, rows, columns) in float32 or
                better, which it may overwrite; the label, int64 (B, rows,
                columns), zero where it is ignored; and where it is not, bool
                (B, rows, columns). It returns the gradient of its share of
                the loss with respect to the resized logits, if that is asked
                for.
            differentiate: ask for it.

        Returns:
            The gradient with respect to ``logits``, in float32 or better;
            None if it was not asked for.
        """
        dtype = sum_dtype(logits.dtype)
        gradient = None
        if differentiate:
            gradient = torch.zeros_like(logits, dtype=dtype)
        for rows, columns in self._pieces():
            label = self.label[:, slice(*rows), slice(*columns)]
            valid = label != self.ignore_index
            window = _source(self.place, rows, columns)
            piece = logits[:, :, window.rows, window.columns].to(dtype)
            with torch.set_grad_enabled(differentiate):
                piece = piece.detach().requires_grad_(differentiate)
                fine = resize_part(piece, *window.axes, *window.pixels)
            slope = visit(
                fine.detach().log_softmax(1),
                label.masked_fill(~valid, 0),
                valid,
            )
            if gradient is not None:
                (grad,) = torch.autograd.grad(fine, piece, slope)
                gradient[:, :, window.rows, window.columns] += grad
        return gradient

    def _pieces(self) -> Iterator[tuple[Rows, Rows]]:
        _, height, width = self.label.shape
        pixels = self.max_logits // self._pixel
        # Whole rows if they fit, for they lie side by side in memory.
        columns = min(width, pixels)
        for rows in bands_of(height, max(pixels // columns, 1)):
            for run in bands_of(width, columns):
                yield rows, run


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


def _source(place: Place, rows: Rows, columns: Rows) -> _Window:
    axes, parts = (place.down, place.across), (rows, columns)
    pixels, slices, moved = [], [], []
    for axis, part, start in zip(axes, parts, place.first, strict=True):
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
