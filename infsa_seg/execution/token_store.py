# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where the tokens of an image wait from one sweep to the next."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infsa_seg.ops import Rows

from .layout import Layout


class TokenStore(abc.ABC):
    """Tokens that are read and written in parts, (1, rows, columns, width).

    A sweep reads what the last one wrote: :meth:`flip` ends a sweep. A reader
    keeps the rows above its band itself, as the sweep may have overwritten
    them already. Tokens that the layout leaves out are zero.

    Args:
        layout: which tokens are kept.
        width: channels of a token.
        dtype: in which they are kept.
    """

    def __init__(self, layout: Layout, width: int, dtype: torch.dtype) -> None:
        self.layout, self.width, self.dtype = layout, width, dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of all tokens."""
        return self.layout.num_stored * self.width * self.dtype.itemsize

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """Tokens that the last sweep wrote."""
        shape = (1, rows.num_rows, columns.num_rows, self.width)
        x = torch.zeros(shape, dtype=self.dtype)
        for part, place, tokens in self._parts(rows, columns, False):
            x[0, part.within(rows), place] = tokens
        return x

    def write(self, rows: Rows, columns: Rows, x: Tensor) -> None:
        """Tokens for the next sweep."""
        for part, place, tokens in self._parts(rows, columns, True):
            tokens.copy_(x[0, part.within(rows), place])

    def _parts(
        self, rows: Rows, columns: Rows, writing: bool
    ) -> Iterator[tuple[Rows, slice, Tensor]]:
        """Rows, columns (of those asked for), and their tokens in place."""
        for block in self.layout.blocks(rows):
            count = block.rows.num_rows * block.num_columns
            tokens = self._view(block.first, count, writing)
            tokens = tokens.view(
                block.rows.num_rows, block.num_columns, self.width
            )
            left = 0
            for run in block.runs:
                part = Rows(
                    max(run.start, columns.start), min(run.stop, columns.stop)
                )
                if part.num_rows > 0:
                    first = left + part.start - run.start
                    found = tokens[:, first : first + part.num_rows]
                    yield block.rows, part.within(columns), found
                left += run.num_rows

    @abc.abstractmethod
    def _view(self, first: int, count: int, writing: bool) -> Tensor:
        """Tokens (count, width) in place, of the last sweep or the next."""

    @abc.abstractmethod
    def flip(self) -> None:
        """End a sweep; all of them write the same tokens."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the tokens."""


class RamStore(TokenStore):
    """One copy in memory; a sweep overwrites what it has read."""

    def __init__(self, layout: Layout, width: int, dtype: torch.dtype) -> None:
        super().__init__(layout, width, dtype)
        shape = (layout.num_stored, width)
        self._tokens: Tensor | None = torch.zeros(shape, dtype=dtype)

    def _view(self, first: int, count: int, writing: bool) -> Tensor:
        assert self._tokens is not None
        return self._tokens[first : first + count]

    def flip(self) -> None:
        pass

    def close(self) -> None:
        self._tokens = None


class FileStore(TokenStore):
    """Two copies on disk, so that a killed sweep can be run again.

    A file is mapped for one band at a time: pages that stayed mapped would
    count as memory of the process.

    Args:
        layout, width, dtype: as for :class:`TokenStore`.
        path: the two files are named after it, with ``.0`` and ``.1``.
        current: which of them holds the tokens, of a run that goes on; None
            for a new one, whose space is reserved at once.

    Raises:
        OSError: the disk has not enough space, or cannot be written.
    """

    def __init__(
        self,
        layout: Layout,
        width: int,
        dtype: torch.dtype,
        path: Path,
        current: int | None = None,
    ) -> None:
        super().__init__(layout, width, dtype)
        self.paths = [path.with_name(f'{path.name}.{i}') for i in range(2)]
        self.current = current or 0
        if current is None:
            for file in self.paths:
                _reserve(file, self.nbytes)

    def _view(self, first: int, count: int, writing: bool) -> Tensor:
        token_bytes = self.width * self.dtype.itemsize
        # As bytes: numpy has no bfloat16.
        memory = np.memmap(
            self.paths[1 - self.current if writing else self.current],
            np.uint8,
            'r+' if writing else 'c',
            first * token_bytes,
            (count * token_bytes,),
        )
        tokens = torch.from_numpy(memory).view(self.dtype)
        return tokens.view(count, self.width)

    def flip(self) -> None:
        # What a journal says of the tokens must hold after a crash.
        with open(self.paths[1 - self.current], 'rb') as file:
            os.fsync(file.fileno())
        self.current = 1 - self.current

    def close(self) -> None:
        for file in self.paths:
            file.unlink(missing_ok=True)


def _reserve(path: Path, nbytes: int) -> None:
    """Make a file of so many bytes that the disk really has."""
    try:
        with open(path, 'wb') as file:
            if nbytes and hasattr(os, 'posix_fallocate'):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:  # other systems find out later
                file.truncate(nbytes)
    except OSError as error:
        # Not every call says which file it was about.
        raise OSError(error.errno, error.strerror, str(path)) from error
