# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Learned positions on any grid, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infsa_seg.ops import Rows, sum_dtype

from .autocast import no_autocast


def cubic_weights(
    num_in: int, num_out: int, rows: Rows, like: Tensor
) -> Tensor:
    """Rows of the matrix that resamples ``num_in`` samples to ``num_out``.

    Cubic convolution with a = -0.75, half-pixel centres, clamped at the ends:
    the same as ``F.interpolate(mode='bicubic', align_corners=False)`` along
    one dimension.

    Returns:
        (rows.num_rows, num_in), dtype and device of ``like``.
    """
    out = torch.arange(*rows, device=like.device, dtype=torch.float64)
    place = (out + 0.5) * (num_in / num_out) - 0.5
    first = place.floor()
    offsets = torch.arange(-1, 3, device=like.device, dtype=torch.float64)
    distance = (place[:, None] - first[:, None] - offsets).abs()
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights = torch.where(distance <= 1, near, far).to(like.dtype)
    taps = (first[:, None] + offsets).long().clamp(0, num_in - 1)
    matrix = weights.new_zeros(rows.num_rows, num_in)
    return matrix.scatter_add(1, taps, weights)


def resample_grid(
    grid: Tensor, size: tuple[int, int], rows: Rows, columns: Rows
) -> Tensor:
    """Bicubic resampling of a grid, only the part that is asked for.

    Args:
        grid: (g_rows, g_columns, C).
        size: rows and columns of the target grid.
        rows, columns: those of the target grid to return.

    Returns:
        (rows, columns, C) in float32 or better; the grid itself where the
        sizes agree.
    """
    grid = grid.to(sum_dtype(grid.dtype))
    if tuple(grid.shape[:2]) == size:
        return grid[slice(*rows), slice(*columns)]
    down = cubic_weights(grid.shape[0], size[0], rows, grid)
    right = cubic_weights(grid.shape[1], size[1], columns, grid)
    # The rows first: a band never meets the full-size grid.
    return right @ torch.einsum('rg,gkc->rkc', down, grid)


class PositionEmbedding(nn.Module):
    """A learned grid of positions, resampled to the grid at hand.

    The source grid is kept as it was trained, so no size is special and
    positions are resampled once, not again and again. A state dict with
    another source grid is resampled to this one when it is loaded.

    Args:
        embed_dims: channels C.
        grid_size: rows and columns of the source grid.
    """

    halo = 0

    def __init__(self, embed_dims: int, grid_size: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*grid_size, embed_dims))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(
        self,
        x: Tensor,
        first: tuple[int, int] = (0, 0),
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Add the positions of a part of the grid.

        Args:
            x: (B, rows, columns, C).
            first: row and column of the whole grid at which the part starts.
            size: rows and columns of the whole grid; None where x is all of
                it.
        """
        shape = (x.shape[1], x.shape[2])
        rows, columns = (
            Rows(start, start + count)
            for start, count in zip(first, shape, strict=True)
        )
        with no_autocast(x.device):
            position = resample_grid(self.weight, size or shape, rows, columns)
        return x + position.to(x.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        key = prefix + 'weight'
        grid = state_dict.get(key)
        mine = self.weight.shape
        if (
            grid is not None
            and grid.dim() == 3
            and grid.shape[2] == mine[2]
            and grid.shape != mine
        ):
            state_dict[key] = resample_grid(
                grid, (mine[0], mine[1]), Rows(0, mine[0]), Rows(0, mine[1])
            ).to(grid.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)
