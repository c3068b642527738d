# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Online hard example mining: which pixels are the hard ones.

To find the k-th hardest of all pixels, on all ranks, none has to be kept: a
number that is not negative is ordered like the bits it is made of. A walk
counts how often each pattern of the upper bits occurs, the next one that of
the bits below among the numbers that begin like the wanted one, until all
bits are known. The counts are a state that bands and ranks add up.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from infsa_seg.layers.protocol import Merge
from infsa_seg.ops import State, sum_dtype

from .strips import Strips

_DIGIT = 16  # bits that a walk finds: two walks in float32
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def entropy(scores: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of each pixel, (B, rows, columns), without weights.

    Args:
        scores: logarithms of the probabilities, (B, classes, rows, columns).
        label: int64 (B, rows, columns).
    """
    # Not the negative, which would be -0 where the probability is 1.
    return scores.gather(1, label[:, None])[:, 0].abs()


def pixel_weight(
    scores: Tensor, label: Tensor, class_weight: Tensor | None
) -> Tensor:
    """Weight of each pixel by its class, (B, rows, columns).

    Args:
        scores, label: as for :func:`entropy`.
        class_weight: (classes,) of their dtype; None for ones.
    """
    if class_weight is None:
        return scores.new_ones(label.shape)
    return class_weight[label]


class Border(NamedTuple):
    """Between the easy pixels and the hard ones.

    Attributes:
        choice: what makes pixels hard.
        rank: () or a number; those of such a hardness are hard anyway.
    """

    choice: HardPixels
    rank: Tensor | float

    def is_hard(self, missed: Tensor, weight: Tensor) -> Tensor:
        """Decide, from the cross-entropy and weight of pixels of any shape."""
        hardness = self.choice.hardness(missed, weight)
        # In a form that shows what is not a number.
        return ~(hardness < self.rank) | self.choice.is_below(missed)


@dataclasses.dataclass
class Histogram(State):
    """How often patterns of bits occur.

    Attributes:
        counts: float64 (1, 2**16), numbers that begin as wanted, by the bits
            that follow.
        below: float64 (1,), pixels whose probability is below the threshold.
    """

    counts: Tensor
    below: Tensor


@dataclasses.dataclass(frozen=True)
class HardPixels:
    """Choose the pixels that are hardest to classify.

    Args:
        thresh (float, optional): Pixels are hard if the probability of their
            class is less. Defaults to None, by rank alone.
        min_kept (int): For each image of the batch, so many pixels of the
            batch are hard at least. Defaults to 100000.

    Raises:
        ValueError: ``thresh`` is no probability, or ``min_kept`` is below 1.
    """

    thresh: float | None = None
    min_kept: int = 100_000

    def __post_init__(self) -> None:
        if self.thresh is not None and not 0 < self.thresh <= 1:
            raise ValueError(
                f'ohem.thresh={self.thresh} is no probability; use one above '
                '0 and up to 1, or None'
            )
        if self.min_kept < 1:
            raise ValueError(
                f'ohem.min_kept={self.min_kept} keeps no pixel; use 1 or more'
            )

    def hardness(self, missed: Tensor, weight: Tensor) -> Tensor:
        """By what pixels are ranked; the shape of both is free.

        Args:
            missed: their cross-entropy.
            weight: their weight.
        """
        return missed * weight if self.thresh is None else missed

    def is_below(self, missed: Tensor) -> Tensor:
        """Whether the probability is below ``thresh``."""
        if self.thresh is None:
            return torch.zeros_like(missed, dtype=torch.bool)
        return missed.neg().exp() < self.thresh

    def border(
        self,
        logits: Tensor,
        strips: Strips,
        class_weight: Tensor | None,
        merge: Merge,
    ) -> Border:
        """Find the border between easy pixels and hard ones.

        The same walks on all ranks, whatever they hold; one ``merge`` each.

        Args:
            logits: (B, classes, height, width), a part of the coarse grid.
            strips: the pixels.
            class_weight: (classes,) in the dtype of sums; None for ones.
            merge: adds what others counted.
        """
        dtype = sum_dtype(logits.dtype)
        everything, nothing = (
            Border(self, rank) for rank in (0.0, float('inf'))
        )
        wanted = self.min_kept * logits.shape[0]
        begin, bits = 0, torch.finfo(dtype).bits
        for shift in range(bits - _DIGIT, -1, -_DIGIT):
            found = merge(
                self._count(logits, strips, class_weight, begin, shift)
            )
            if shift == bits - _DIGIT:
                if found.below >= wanted:
                    return nothing
                if found.counts.sum() <= wanted:
                    return everything
            # Cumulated where torch has one order for it.
            counts = found.counts[0].cpu()
            harder = counts.flip(0).cumsum(0)
            place = int(torch.searchsorted(harder, float(wanted)))
            digit = len(counts) - 1 - place
            wanted -= int(harder[place] - counts[digit])
            begin = begin << _DIGIT | digit
        pattern = torch.tensor(begin, dtype=_INTEGERS[dtype])
        return Border(self, pattern.view(dtype).to(logits.device))

    def _count(
        self,
        logits: Tensor,
        strips: Strips,
        class_weight: Tensor | None,
        begin: int,
        shift: int,
    ) -> Histogram:
        counts = torch.zeros(
            2**_DIGIT, dtype=torch.int64, device=logits.device
        )
        below = counts.new_zeros(1)

        def visit(scores: Tensor, label: Tensor, valid: Tensor) -> None:
            missed = entropy(scores, label)
            below.add_((self.is_below(missed) & valid).sum())
            weight = pixel_weight(scores, label, class_weight)
            hardness = self.hardness(missed, weight)
            bits = hardness.view(_INTEGERS[hardness.dtype]).long() >> shift
            here = valid & (bits >> _DIGIT == begin)
            digit = bits % 2**_DIGIT
            counts.index_add_(0, digit.flatten(), here.long().flatten())

        with torch.no_grad():
            strips.walk(logits, visit)
        return Histogram(counts[None].double(), below.double())
