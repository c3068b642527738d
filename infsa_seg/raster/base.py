# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the readers of all formats share."""

from __future__ import annotations

import errno
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .meta import RasterMeta
from .window import Window

if TYPE_CHECKING:
    from .reader import RasterReader

Reader = TypeVar('Reader', bound='WindowReader')


class Unsupported(ValueError):
    """The file is whole, but of a kind that another reader may know."""


class WindowReader(ABC):
    """A :class:`~.reader.RasterReader` but for the format.

    A subclass sets ``meta``, and gives the pixels of a window together with
    which of them are valid. What cannot be pickled, and what must not be
    shared with a forked process, it drops in ``close`` and makes again when
    it is next asked for pixels.

    Args:
        path: The file.
    """

    meta: RasterMeta

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of the window read last: it fell off on the way to the pixels, and
        # would cost a second decoding.
        self._kept: tuple[Window, int, np.ndarray | None] | None = None

    def read(self, window: Window, level: int = 0) -> np.ndarray:
        """As :meth:`.reader.RasterReader.read` has it."""
        self._check(window, level)
        pixels, valid = self._load_or_say_where(window, level)
        self._kept = window, level, valid
        return pixels

    def read_valid(self, window: Window, level: int = 0) -> np.ndarray | None:
        """As :meth:`.reader.RasterReader.read_valid` has it."""
        self._check(window, level)
        if self.meta.all_valid:
            return None
        kept, self._kept = self._kept, None
        if kept is not None and kept[:2] == (window, level):
            return kept[2]
        return self._load_or_say_where(window, level, False)[1]

    def _load_or_say_where(
        self, window: Window, level: int, with_pixels: bool = True
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Load, and name the window in what goes wrong."""
        size = f'{window.height}x{window.width}'
        where = f'level {level}, window {size} at ({window.row}, {window.col})'
        try:
            if not with_pixels:
                return np.empty(0), self._load_valid(window, level)
            return self._load(window, level)
        except OSError as error:
            raise OSError(
                error.errno,
                f'{error.strerror or error} ({where})',
                error.filename,
            ) from error
        except ValueError as error:
            raise ValueError(f'{error} ({where})') from error

    @abstractmethod
    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Read a window that lies in the picture, at a level that it has.

        Returns:
            The pixels (height, width, channels), contiguous and the caller's
            own; which are valid, as of :func:`valid_pixels`.
        """

    def _load_valid(self, window: Window, level: int) -> np.ndarray | None:
        """Tell what is valid of a window whose pixels are not wanted."""
        return self._load(window, level)[1]

    def close(self) -> None:
        """Let go of the file and of everything kept of it.

        A later read opens it again.
        """
        self._kept = None

    def __enter__(self: Reader) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_kept': None}

    def _check(self, window: Window, level: int) -> None:
        sizes = self.meta.level_sizes
        if not 0 <= level < len(sizes):
            raise ValueError(
                f'{self.path}: has no level {level}; use 0'
                + (f' to {len(sizes) - 1}' if len(sizes) > 1 else '')
            )
        size = sizes[level]
        if min(window[2:]) < 1 or window.clip(*size) != window:
            raise ValueError(
                f'{self.path}: a window of {window.height}x{window.width} at '
                f'({window.row}, {window.col}) is not within its '
                f'{size[0]}x{size[1]} pixels'
            )


class WrappedReader(WindowReader):
    """Another view of a raster that a reader reads.

    Args:
        reader: Of the raster; it is closed with this one.
    """

    def __init__(self, reader: RasterReader) -> None:
        super().__init__(getattr(reader, 'path', Path('raster')))
        self.reader = reader

    def _load_or_say_where(
        self, window: Window, level: int, with_pixels: bool = True
    ) -> tuple[np.ndarray, np.ndarray | None]:
        # The reader has said it.
        if not with_pixels:
            return np.empty(0), self._load_valid(window, level)
        return self._load(window, level)

    def close(self) -> None:
        """Let go of the file and of everything kept of it."""
        super().close()
        self.reader.close()


def valid_pixels(
    stored: np.ndarray,
    nodata: float | None,
    alphas: Sequence[np.ndarray] = (),
) -> np.ndarray | None:
    """Tell which pixels are valid.

    Args:
        stored: Values as the file has them (height, width, channels).
        nodata: A pixel is invalid where all channels have this value.
        alphas: Opacities (height, width); invalid where one of them is 0.

    Returns:
        bool (height, width), False also where a channel is NaN; None if
        there is nothing by which a pixel could be invalid.
    """
    doubts = []
    # Channel by channel: temporary arrays stay as small as the result.
    if stored.dtype.kind == 'f':
        holes = np.zeros(stored.shape[:2], bool)
        for channel in range(stored.shape[2]):
            holes |= ~np.isfinite(stored[..., channel])
        doubts.append(holes)
    if nodata is not None:
        empty = np.ones(stored.shape[:2], bool)
        value = stored.dtype.type(nodata)
        for channel in range(stored.shape[2]):
            empty &= stored[..., channel] == value
        doubts.append(empty)
    doubts += [alpha == 0 for alpha in alphas]
    return ~np.logical_or.reduce(doubts) if doubts else None


def is_value(nodata: float, dtype: np.dtype) -> bool:
    """Whether a number can occur among values of a type."""
    if dtype.kind == 'f':
        with np.errstate(over='ignore'):
            return bool(np.isfinite(dtype.type(nodata))) or not np.isfinite(
                nodata
            )
    if not float(nodata).is_integer():
        return False
    limits = np.iinfo(dtype)
    return limits.min <= nodata <= limits.max


def check_nodata(path: Path, nodata: float | None, dtype: np.dtype) -> None:
    """Refuse a nodata value that the file cannot have.

    Raises:
        ValueError: It cannot.
    """
    if nodata is not None and not is_value(nodata, dtype):
        raise ValueError(
            f'{path}: nodata={nodata:g} is no value of its type, {dtype}; '
            'give another or none'
        )


def is_level(full: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether one picture can be a smaller version of another.

    Args:
        full: (height, width) of the other.
        size: (height, width).

    Returns:
        Whether it is smaller, by a factor that is the same down and across
        but for rounding either way.
    """
    if not 0 < max(size) < max(full) or min(size) < 1:
        return False
    least = [n / (m + 1) for n, m in zip(full, size, strict=True)]
    most = [
        n / (m - 1) if m > 1 else math.inf
        for n, m in zip(full, size, strict=True)
    ]
    return max(least) <= min(most)


@contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises into one line that names the file.

    Args:
        path: The file.
        what: What it must be if the block fails, and what to do.

    Raises:
        OSError: The operating system could not open or read it.
        ValueError: Anything else that went wrong.
    """
    try:
        yield
    except OSError as error:
        # Decoders seek to where a damaged file tells them.
        if error.errno in (None, errno.EINVAL):
            raise ValueError(f'{path}: {what}') from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f'{path}: {what}') from error
