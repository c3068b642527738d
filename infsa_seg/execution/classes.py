# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Logits to classes, before anything is kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from infsa_seg.ops import Rows

from .resize import Piece


def classify(logits: Tensor, threshold: float = 0.5) -> Tensor:
    """The class of each place.

    Args:
        logits: (classes, height, width); one class stands for background and
            foreground.
        threshold: of the foreground's probability.

    Returns:
        int64 (height, width).
    """
    if len(logits) == 1:
        return (logits[0].sigmoid() > threshold).long()
    return logits.argmax(0)


def probabilities(logits: Tensor) -> Tensor:
    """Class probabilities, shaped like the logits (classes, height, width)."""
    return logits.sigmoid() if len(logits) == 1 else logits.softmax(0)


def class_rows(
    rows: Rows, width: int, pieces: Iterable[Piece], threshold: float = 0.5
) -> Tensor:
    """The classes of a band, int64 (rows.num_rows, width) on the host."""
    classes = torch.empty(rows.num_rows, width, dtype=torch.long)
    for piece in pieces:
        classes[piece.place(rows.start)] = classify(piece.logits, threshold)
    return classes
