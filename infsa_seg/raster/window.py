# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Rectangles of pixels: integers in, integers out."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """A rectangle, in pixels of level 0 unless said otherwise.

    It covers the rows from ``row`` up to and without ``row + height``, and
    the columns likewise.
    """

    row: int
    col: int
    height: int
    width: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns, to take the window out of an array (H, W, ...)."""
        return (
            slice(self.row, self.row + self.height),
            slice(self.col, self.col + self.width),
        )

    def intersect(self, other: Window) -> Window:
        """The part that lies in both; of no rows or columns if none does."""
        row, col = max(self.row, other.row), max(self.col, other.col)
        below = min(self.row + self.height, other.row + other.height)
        right = min(self.col + self.width, other.col + other.width)
        return Window(row, col, max(below - row, 0), max(right - col, 0))

    def clip(self, height: int, width: int) -> Window:
        """The part that lies in a picture of this size."""
        return self.intersect(Window(0, 0, height, width))

    def within(self, outer: Window) -> tuple[slice, slice]:
        """The slices that take this window out of an array of ``outer``."""
        row, col = self.row - outer.row, self.col - outer.col
        return Window(row, col, self.height, self.width).slices
