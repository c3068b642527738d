# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Partition arithmetic: integers in, integers out.

The one partition that chunks, bands and ranks share. A row is a row of
whatever is being cut: pixels, tokens or output blocks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Rows(NamedTuple):
    """The half-open range of rows ``start`` to ``stop`` of a whole."""

    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.stop - self.start

    def grow(self, halo: int, total: int) -> Rows:
        """Add ``halo`` rows on each side, clipped to ``0 ... total``."""
        return Rows(max(self.start - halo, 0), min(self.stop + halo, total))

    def within(self, outer: Rows) -> slice:
        """The slice that takes these rows out of a tensor of ``outer``."""
        return slice(self.start - outer.start, self.stop - outer.start)


def split_rows(num_rows: int, parts: int, multiple: int = 1) -> list[Rows]:
    """Cut rows into consecutive parts of nearly equal height.

    Args:
        num_rows: rows to cut, at least 0.
        parts: how many parts, at least 1.
        multiple: every border between two parts is a multiple of this.

    Returns:
        ``parts`` ranges that cover all rows in order. Heights differ by at
        most ``multiple`` (the last one may be cut short by the end); where
        there are too few rows the last parts are empty.

    Raises:
        ValueError: if an argument is below its minimum.
    """
    if num_rows < 0 or parts < 1 or multiple < 1:
        raise ValueError(
            'split_rows needs num_rows >= 0, parts >= 1 and multiple >= 1, '
            f'got {num_rows}, {parts}, {multiple}'
        )
    units = -(-num_rows // multiple)
    least, extra = divmod(units, parts)
    borders = [
        min((part * least + min(part, extra)) * multiple, num_rows)
        for part in range(parts + 1)
    ]
    return [Rows(a, b) for a, b in itertools.pairwise(borders)]


def bands_of(num_rows: int, height: int) -> list[Rows]:
    """Cut rows into bands of ``height``; the last may be lower."""
    if height < 1:
        raise ValueError(f'a band has at least one row, got {height}')
    return [
        Rows(start, min(start + height, num_rows))
        for start in range(0, num_rows, height)
    ]
