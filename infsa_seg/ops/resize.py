# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Bilinear resizing of a part of a grid, as if the whole were resized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import Rows


class Axis(NamedTuple):
    """How a part of a coarse axis lies in a resized whole.

    Attributes:
        first: place of the whole coarse axis at which the part begins.
        num_in: places of the whole coarse axis.
        num_out: places of the whole fine axis.
    """

    first: int
    num_in: int
    num_out: int

    def source(self, part: Rows) -> Rows:
        """The places of the whole coarse axis that a fine part looks at."""
        low, _ = self._low(part)
        last = int(low[-1]) + 1
        return Rows(int(low[0]), min(last + 1, self.num_in))

    def taps(self, part: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Two neighbours of each fine place and the share of the second.

        As ``F.interpolate(mode='bilinear', align_corners=False)`` has them.

        Returns:
            int64, int64 (places of the whole coarse axis) and float64.
        """
        low, share = self._low(part)
        return low, (low + 1).clamp(max=self.num_in - 1), share

    def _low(self, part: Rows) -> tuple[Tensor, Tensor]:
        places = torch.arange(*part, dtype=torch.float64)
        places = (places + 0.5) * (self.num_in / self.num_out) - 0.5
        places = places.clamp(min=0)
        low = places.floor().clamp(max=self.num_in - 1)
        return low.long(), places - low


class Place(NamedTuple):
    """Where the logits and the labels of a band lie in the image.

    Attributes:
        down, across: of the logits.
        first: pixel row and column at which the labels begin.
    """

    down: Axis
    across: Axis
    first: tuple[int, int] = (0, 0)


def resize_part(
    x: Tensor, down: Axis, across: Axis, rows: Rows, columns: Rows
) -> Tensor:
    """A part of a bilinearly resized grid; differentiable.

    Args:
        x: (B, C, height, width), a part of the coarse grid.
        down, across: where it lies, along its height and its width.
        rows, columns: of the resized whole, at least one each.

    Returns:
        (B, C, rows, columns) in the dtype of ``x``.

    Raises:
        ValueError: a neighbour that is needed lies outside ``x``.
    """
    for axis, part, length, name in (
        (down, rows, x.shape[2], 'rows'),
        (across, columns, x.shape[3], 'columns'),
    ):
        source = axis.source(part)
        if source.start < axis.first or source.stop > axis.first + length:
            raise ValueError(
                f'resized {name} {part.start} to {part.stop} need the coarse '
                f'{name} {source.start} to {source.stop}, but only '
                f'{axis.first} to {axis.first + length} are there'
            )
    source = down.source(rows)
    x = x.narrow(2, source.start - down.first, source.num_rows)
    # The columns first: there are fewer coarse rows than fine ones.
    x = _lerp(x, 3, across, columns)
    return _lerp(x, 2, down._replace(first=source.start), rows)


def _lerp(x: Tensor, dim: int, axis: Axis, part: Rows) -> Tensor:
    low, high, share = axis.taps(part)
    share = share.to(x.device, x.dtype)
    first = x.index_select(dim, (low - axis.first).to(x.device))
    second = x.index_select(dim, (high - axis.first).to(x.device))
    return torch.lerp(first, second, share if dim == 3 else share[:, None])
