# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where the tokens of an image wait from one sweep to the next."""

from __future__ import annotations

import abc
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infsa_seg.ops import Rows


class TokenStore(abc.ABC):
    """Tokens that are read and written in parts, (1, rows, columns, width).

    A sweep reads what the last one wrote: :meth:`flip` ends a sweep. A reader
    keeps the rows above its band itself, as the sweep may have overwritten
    them already. Tokens that no sweep writes are zero, and take no memory
    and hardly any time.

    Args:
        rows, columns: the grid of tokens.
        width: channels of a token.
        dtype: in which they are kept.
    """

    def __init__(
        self, rows: int, columns: int, width: int, dtype: torch.dtype
    ) -> None:
        self.shape = (rows, columns, width)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of all tokens."""
        rows, columns, width = self.shape
        return rows * columns * width * self.dtype.itemsize

    @abc.abstractmethod
    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """Tokens that the last sweep wrote."""

    @abc.abstractmethod
    def write(self, rows: Rows, columns: Rows, x: Tensor) -> None:
        """Tokens for the next sweep."""

    @abc.abstractmethod
    def flip(self) -> None:
        """End a sweep; all of them write the same tokens."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the tokens."""


class RamStore(TokenStore):
    """One copy in memory; a sweep overwrites what it has read."""

    def __init__(
        self, rows: int, columns: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__(rows, columns, width, dtype)
        self._tokens: Tensor | None = torch.zeros(self.shape, dtype=dtype)

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        assert self._tokens is not None
        return self._tokens[None, slice(*rows), slice(*columns)].clone()

    def write(self, rows: Rows, columns: Rows, x: Tensor) -> None:
        assert self._tokens is not None
        self._tokens[slice(*rows), slice(*columns)] = x[0]

    def flip(self) -> None:
        pass

    def close(self) -> None:
        self._tokens = None


class FileStore(TokenStore):
    """Two copies on disk, so that a killed sweep can be run again.

    A file is mapped for one band at a time: pages that stayed mapped would
    count as memory of the process.

    Args:
        rows, columns, width, dtype: as for :class:`TokenStore`.
        path: the two files are named after it, with ``.0`` and ``.1``.
        current: which of them holds the tokens, of a run that goes on; None
            for a new one, whose space is reserved at once.

    Raises:
        OSError: the disk has not enough space, or cannot be written.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        width: int,
        dtype: torch.dtype,
        path: Path,
        current: int | None = None,
    ) -> None:
        super().__init__(rows, columns, width, dtype)
        self.paths = [path.with_name(f'{path.name}.{i}') for i in range(2)]
        self.current = current or 0
        if current is None:
            for file in self.paths:
                _reserve(file, self.nbytes)

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        tokens = self._map(self.current, rows, 'r')
        return tokens[:, :, slice(*columns)].clone()

    def write(self, rows: Rows, columns: Rows, x: Tensor) -> None:
        tokens = self._map(1 - self.current, rows, 'r+')
        tokens[:, :, slice(*columns)] = x

    def flip(self) -> None:
        # What a journal says of the tokens must hold after a crash.
        with open(self.paths[1 - self.current], 'rb') as file:
            os.fsync(file.fileno())
        self.current = 1 - self.current

    def close(self) -> None:
        for file in self.paths:
            file.unlink(missing_ok=True)

    def _map(self, index: int, rows: Rows, mode: str) -> Tensor:
        _, columns, width = self.shape
        row_bytes = columns * width * self.dtype.itemsize
        # As bytes: numpy has no bfloat16.
        memory = np.memmap(
            self.paths[index],
            np.uint8,
            'c' if mode == 'r' else 'r+',
            rows.start * row_bytes,
            (rows.num_rows * row_bytes,),
        )
        tokens = torch.from_numpy(memory).view(self.dtype)
        return tokens.view(1, rows.num_rows, columns, width)


def _reserve(path: Path, nbytes: int) -> None:
    """Make a file of so many bytes that the disk really has."""
    try:
        with open(path, 'wb') as file:
            if hasattr(os, 'posix_fallocate'):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:  # other systems find out later
                file.truncate(nbytes)
    except OSError as error:
        # Not every call says which file it was about.
        raise OSError(error.errno, error.strerror, str(path)) from error
