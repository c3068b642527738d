# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Which tokens of an image are computed and stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from infsa_seg.ops import Rows, bands_of

# Columns without a valid token that are worth a cut.
_GAP = 32
# Token rows that are stored alike.
_STRIPE = 8


class Block(NamedTuple):
    """Tokens of some rows that lie one after another in a store.

    Attributes:
        first: number of the first in the store.
        rows: the rows.
        runs: columns of each row, from the left.
    """

    first: int
    rows: Rows
    runs: list[Rows]

    @property
    def num_columns(self) -> int:
        """Tokens of a row."""
        return sum(run.num_rows for run in self.runs)


class Layout:
    """The tokens of an image, of which only the valid ones are kept.

    It does not depend on how the image is cut into bands.

    Args:
        rows, columns: the grid of tokens.
        valid: bool (rows, columns) of the tokens that have a valid pixel, of
            :func:`infsa_seg.execution.bands.read_token_mask`; None for all.
    """

    def __init__(
        self, rows: int, columns: int, valid: Tensor | None = None
    ) -> None:
        self.rows, self.columns, self.valid = rows, columns, valid
        self._height = rows if valid is None else _STRIPE
        stripes = [
            Block(0, stripe, self.runs(stripe))
            for stripe in bands_of(rows, self._height)
        ]
        sizes = (s.rows.num_rows * s.num_columns for s in stripes)
        starts = [0, *itertools.accumulate(sizes)]
        self._stripes = [
            stripe._replace(first=first)
            for stripe, first in zip(stripes, starts, strict=False)
        ]
        # The valid tokens and those in small gaps between them.
        self.num_stored = starts[-1]
        self.num_valid = rows * columns
        if valid is not None:
            self.num_valid = int(valid.sum())

    def runs(self, rows: Rows) -> list[Rows]:
        """The columns of some rows that are worth looking at."""
        if self.valid is None:
            return [Rows(0, self.columns)]
        return valid_runs(self.valid[slice(*rows)])

    def blocks(self, rows: Rows) -> Iterator[Block]:
        """Where in a store some rows lie."""
        last = -(-rows.stop // self._height)
        for stripe in self._stripes[rows.start // self._height : last]:
            start = max(stripe.rows.start, rows.start)
            stop = min(stripe.rows.stop, rows.stop)
            above = (start - stripe.rows.start) * stripe.num_columns
            if stripe.runs:
                yield Block(
                    stripe.first + above, Rows(start, stop), stripe.runs
                )


def valid_runs(valid: Tensor) -> list[Rows]:
    """The columns of a band in which a token is valid.

    Args:
        valid: bool (rows, columns).

    Returns:
        Ranges of columns with wide gaps between them, from the left; none
        where nothing is valid.
    """
    columns = valid.any(0).nonzero()[:, 0]
    if not len(columns):
        return []
    # The last columns before a gap.
    ends = (columns.diff() > _GAP).nonzero()[:, 0]
    starts = [0, *(ends + 1).tolist()]
    stops = [*ends.tolist(), len(columns) - 1]
    return [
        Rows(int(columns[first]), int(columns[last]) + 1)
        for first, last in zip(starts, stops, strict=True)
    ]
