# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What an executor cuts into bands: the image, and its grid of tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infsa_seg.ops import Rows, bands_of


class Image(Protocol):
    """An image that is read in parts and never all at once.

    Attributes:
        height, width: in pixels.
    """

    height: int
    width: int

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """Pixels, float (1, channels, rows, columns), normalised.

        What invalid pixels hold does not matter.
        """
        ...

    def read_valid(self, rows: Rows, columns: Rows) -> Tensor | None:
        """Bool (rows, columns), False where a pixel is not to count.

        None where every pixel of the image counts.
        """
        ...


class Grid(NamedTuple):
    """The tokens of an image; the last row and column may be cut short.

    Attributes:
        height, width: of the image in pixels.
        patch_size: side of a token in pixels.
    """

    height: int
    width: int
    patch_size: int

    @property
    def rows(self) -> int:
        """Token rows."""
        return -(-self.height // self.patch_size)

    @property
    def columns(self) -> int:
        """Token columns."""
        return -(-self.width // self.patch_size)

    @property
    def shape(self) -> tuple[int, int]:
        """Token rows and columns."""
        return self.rows, self.columns

    def pixel_rows(self, rows: Rows) -> Rows:
        """The pixel rows of some token rows."""
        return Rows(
            rows.start * self.patch_size,
            min(rows.stop * self.patch_size, self.height),
        )

    def pixel_columns(self, columns: Rows) -> Rows:
        """The pixel columns of some token columns."""
        return Rows(
            columns.start * self.patch_size,
            min(columns.stop * self.patch_size, self.width),
        )


def read_token_mask(image: Image, grid: Grid, band_rows: int) -> Tensor | None:
    """Which tokens have a valid pixel.

    Args:
        image: its validity is read band by band.
        grid: its tokens.
        band_rows: token rows that are read at once.

    Returns:
        Bool (rows, columns), or None where every token has.
    """
    mask = torch.ones(grid.rows, grid.columns, dtype=torch.bool)
    columns = Rows(0, grid.width)
    for rows in bands_of(grid.rows, band_rows):
        valid = image.read_valid(grid.pixel_rows(rows), columns)
        if valid is None:
            return None
        mask[slice(*rows)] = any_valid(valid, grid.patch_size)
    return None if mask.all() else mask


def any_valid(valid: Tensor, patch_size: int) -> Tensor:
    """Reduce a pixel mask (height, width) to its tokens, (rows, columns)."""
    height, width = valid.shape
    valid = torch.nn.functional.pad(
        valid, (0, -width % patch_size, 0, -height % patch_size)
    )
    rows, columns = (side // patch_size for side in valid.shape)
    return valid.view(rows, patch_size, columns, patch_size).any(3).any(1)
