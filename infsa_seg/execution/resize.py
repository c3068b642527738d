# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Logits of a band at the size of its pixels, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from infsa_seg.ops import Rows

from .bands import Grid

# Logits at pixel resolution that exist at once: few enough for any cache and
# any index, whatever the number of classes.
_PIECE = 2**21


class Piece(NamedTuple):
    """Logits of a part of an image.

    Attributes:
        row, col: its first pixel in the image.
        logits: float32 (classes, height, width).
    """

    row: int
    col: int
    logits: Tensor

    def place(self, row: int = 0) -> tuple[slice, slice]:
        """Its rows and columns in an array that begins at a row."""
        height, width = self.logits.shape[1:]
        top = self.row - row
        return slice(top, top + height), slice(self.col, self.col + width)


def resize_in_pieces(
    logits: Tensor,
    grown: tuple[Rows, Rows],
    wanted: tuple[Rows, Rows],
    grid: Grid,
    stride: Fraction,
) -> Iterator[Piece]:
    """Resize logits of a part bilinearly, as those of the whole image.

    Args:
        logits: (1, classes, height, width), one per ``stride`` pixels.
        grown: the token rows and columns that they cover.
        wanted: the token rows and columns that are wanted.
        grid: of the image, beyond whose last pixels nothing is wanted.
        stride: in pixels.

    Yields:
        Pieces that cover the wanted tokens once.
    """
    # Nearly square, for the fewest neighbours.
    tokens = max(_PIECE // (logits.shape[1] * grid.patch_size**2), 1)
    band, run = wanted
    rows = min(math.isqrt(tokens), band.num_rows)
    columns = min(tokens // rows, run.num_rows)
    for top in range(band.start, band.stop, rows):
        down = _Part(
            Rows(top, min(top + rows, band.stop)),
            grown[0],
            grid.patch_size,
            stride,
            grid.height,
        )
        for left in range(run.start, run.stop, columns):
            across = _Part(
                Rows(left, min(left + columns, run.stop)),
                grown[1],
                grid.patch_size,
                stride,
                grid.width,
            )
            resized = F.interpolate(
                logits[:, :, down.source, across.source].to(torch.float32),
                scale_factor=float(stride),
                mode='bilinear',
                recompute_scale_factor=False,
            )
            yield Piece(
                down.start,
                across.start,
                resized[0, :, down.result, across.result],
            )


class _Part:
    """Along one axis: which logits to resize, and which pixels to keep.

    The logits are the wanted ones and, where there are any, enough neighbours
    for a whole number of pixels.

    Args:
        part: tokens that are wanted.
        whole: tokens whose logits are there.
        patch_size, stride: in pixels.
        size: of the image in pixels.
    """

    def __init__(
        self,
        part: Rows,
        whole: Rows,
        patch_size: int,
        stride: Fraction,
        size: int,
    ) -> None:
        def place(token: int) -> int:
            return int((token - whole.start) * patch_size / stride)

        wanted = Rows(place(part.start), place(part.stop))
        taken = wanted.grow(stride.denominator, place(whole.stop))
        self.start = part.start * patch_size
        self.source = slice(*taken)
        first = int((wanted.start - taken.start) * stride)
        stop = min(part.stop * patch_size, size)
        self.result = slice(first, first + stop - self.start)
