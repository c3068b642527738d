# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A raster of which some blocks cannot be read, and the rest can."""

from __future__ import annotations

import dataclasses
import errno
import os
from itertools import groupby

import numpy as np

from .base import WrappedReader
from .reader import RasterReader
from .window import Window

# Height and width of what is given up at once, where blocks are not known.
_CELL = 256
_SMALLEST_CELL, _LARGEST_CELL = 64, 1024
# Strips of fewer rows are taken together: there would be too many.
_FEWEST_ROWS = 16
# What is read at once of a window with damage, so that it costs no memory.
_NUM_PIXELS = 2**20
# The fault is not in the blocks of the file.
_NOT_TOLERATED = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE),
)


class TolerantReader(WrappedReader):
    """Reads what can be read of a raster: the rest is 0, and not valid.

    A window that fails is read again, in parts, from the file opened anew.
    What fails is split until it is one block that failed twice: it has
    ``meta.block_rows`` rows, and as many columns if that is the side of a
    usual tile, else 256. Blocks that failed are remembered, also when the
    reader is pickled. They are not tried again, so that a second read gives
    what the first one gave.

    ``meta`` is that of the raster, but for ``has_alpha``: any pixel may turn
    out to be invalid.

    Args:
        reader: The raster. It is closed with this one.

    Raises:
        OSError: The file is gone, may not be read, or the process has too
            many files open.
        ValueError: A window leaves the picture, or there is no such level.
    """

    def __init__(self, reader: RasterReader) -> None:
        super().__init__(reader)
        self.meta = dataclasses.replace(reader.meta, has_alpha=True)
        rows = self.meta.block_rows
        if rows < _FEWEST_ROWS:
            rows *= -(-_FEWEST_ROWS // rows)
        is_tile = _SMALLEST_CELL <= rows <= _LARGEST_CELL
        self._cell = rows, rows if is_tile else _CELL
        # (level, row, column) in cells.
        self._bad: set[tuple[int, int, int]] = set()

    @property
    def bad_blocks(self) -> list[tuple[int, Window]]:
        """What could not be read so far: (level, window), in order.

        Windows do not overlap; blocks that touch are taken together. Those of
        a level other than 0 are in its pixels.
        """
        runs: dict[tuple[int, int, int], list[int]] = {}
        for (level, row), cells in groupby(sorted(self._bad), _line):
            cols = [col for *_, col in cells]
            for first, last in _runs(cols):
                runs.setdefault((level, first, last), []).append(row)
        height, width = self._cell
        return sorted(
            (
                level,
                Window(
                    top * height,
                    left * width,
                    (below - top) * height,
                    (right - left) * width,
                ).clip(*self.meta.level_sizes[level]),
            )
            for (level, left, right), rows in runs.items()
            for top, below in _runs(rows)
        )

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if not self._meets_damage(window, level):
            found = self._try(window, level)
            if found is not None:
                return found
        size = window.height, window.width
        pixels = np.zeros((*size, self.meta.channels), self.meta.dtype)
        valid = np.zeros(size, bool)
        pieces = [window]
        while pieces:
            piece = pieces.pop()
            halves = self._halves(piece)
            found = None
            is_small = piece.height * piece.width <= _NUM_PIXELS
            if not self._meets_damage(piece, level):
                if is_small or not halves:
                    found = self._try(piece, level)
                if found is None and not halves:
                    found = self._try(piece, level)
                    if found is None:
                        self._bad.add((level, *self._cells(piece)[0]))
            if found is not None:
                place = piece.within(window)
                pixels[place], valid[place] = found
            else:
                # From top to bottom, as decoders like it.
                pieces += reversed(halves)
        return pixels, valid

    def _try(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Pixels and validity; None, and the file closed, if it fails."""
        try:
            pixels = self.reader.read(window, level)
            valid = self.reader.read_valid(window, level)
        except (OSError, ValueError) as error:
            # Some decoders refuse everything once they have failed.
            self.reader.close()
            if isinstance(error, OSError) and error.errno in _NOT_TOLERATED:
                raise
            path = getattr(self.reader, 'path', None)
            if path is not None and not path.exists():
                raise FileNotFoundError(
                    errno.ENOENT, os.strerror(errno.ENOENT), str(path)
                ) from error
            return None
        if valid is None:
            valid = np.ones((window.height, window.width), bool)
        return pixels, valid

    def _cells(self, window: Window) -> tuple[tuple[int, int], ...]:
        """(row, column) of the first and of the last cell that it meets."""
        height, width = self._cell
        return (
            (window.row // height, window.col // width),
            (
                (window.row + window.height - 1) // height,
                (window.col + window.width - 1) // width,
            ),
        )

    def _meets_damage(self, window: Window, level: int) -> bool:
        if not self._bad:
            return False
        (top, left), (bottom, right) = self._cells(window)
        if (bottom - top + 1) * (right - left + 1) > len(self._bad):
            return any(
                level == at and top <= row <= bottom and left <= col <= right
                for at, row, col in self._bad
            )
        return any(
            (level, row, col) in self._bad
            for row in range(top, bottom + 1)
            for col in range(left, right + 1)
        )

    def _halves(self, window: Window) -> list[Window]:
        """Cut between two cells, rows first; nothing if it is in one."""
        row, col, height, width = window
        (top, left), (bottom, right) = self._cells(window)
        if top < bottom:
            cut = (top + bottom + 1) // 2 * self._cell[0] - row
            return [
                Window(row, col, cut, width),
                Window(row + cut, col, height - cut, width),
            ]
        if left < right:
            cut = (left + right + 1) // 2 * self._cell[1] - col
            return [
                Window(row, col, height, cut),
                Window(row, col + cut, height, width - cut),
            ]
        return []


def _line(cell: tuple[int, int, int]) -> tuple[int, int]:
    return cell[:2]


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Start and end of consecutive numbers, which are given in order."""
    known = set(numbers)
    starts = [number for number in numbers if number - 1 not in known]
    stops = [number + 1 for number in numbers if number + 1 not in known]
    return list(zip(starts, stops, strict=True))
