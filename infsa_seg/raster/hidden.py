# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where a file is written to before it appears under its name."""

import errno
import glob
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Writer = TypeVar('Writer', bound='HiddenWriter')


def reserve(path: Path, overwrite: bool, suffix: str = '') -> Path:
    """Make sure that a file can be written, before any work is done.

    The directory is made if need be, and what processes that died have left
    of this file is removed.

    Args:
        path: Where the file belongs.
        overwrite: Whether it may exist; it is left as it is.
        suffix: Of the hidden file.

    Returns:
        An empty hidden file beside ``path``, to be renamed when complete.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is not set.
        OSError: ``path`` is a directory, or cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), str(path)
        )
    if path.exists() and not overwrite:
        raise FileExistsError(
            errno.EEXIST, 'exists; use --overwrite', str(path)
        )
    folder, name = path.parent, path.name
    folder.mkdir(parents=True, exist_ok=True)
    for stale in hidden_files(path, None):
        owner = stale.name[len(name) + 2 :].partition('.')[0]
        if not _is_running(int(owner)):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)
    part = folder / f'.{name}.{os.getpid()}.part{suffix}'
    try:
        part.touch()
    except OSError as error:
        raise OSError(
            error.errno, f'cannot be written: {error.strerror}', str(path)
        ) from error
    return part


class HiddenWriter(ABC):
    """Writes to a hidden file, which appears when a ``with`` block ends well.

    If it ends in any other way, what was written is removed.
    """

    @abstractmethod
    def close(self) -> None:
        """Complete the file and put it in its place."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: remove what was written, and leave ``path`` as it was."""

    def __enter__(self: Writer) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def hidden_files(path: Path, owner: int | None) -> list[Path]:
    """The hidden files of a file, with what libraries keep beside them.

    Args:
        path: Where the file belongs.
        owner: Number of the process that made them; None for any.
    """
    number = r'\d+' if owner is None else str(owner)
    # Not those of a file whose name begins likewise.
    pattern = re.compile(
        rf'\.{re.escape(path.name)}\.{number}(\.rows)?\.part.*'
    )
    return [
        file
        for file in path.parent.glob(f'.{glob.escape(path.name)}.*')
        if pattern.fullmatch(file.name)
    ]


@contextmanager
def staged(
    paths: Mapping[str, Path], overwrite: bool
) -> Iterator[dict[str, Path]]:
    """Let several files appear together, when all of them are complete.

    Args:
        paths: Where they belong, all in one directory.
        overwrite: Whether they may exist; they are replaced at the end.

    Yields:
        Where to write them, in a hidden directory. They are moved when the
        block ends, in the order of ``paths``; whatever ends it early removes
        all of them.

    Raises:
        FileExistsError: One exists, and ``overwrite`` is not set.
        OSError: One is a directory, or the directory cannot be written.
    """
    for path in paths.values():
        reserve(path, overwrite).unlink()
    first = next(iter(paths.values()))
    folder = first.with_name(f'.{first.name}.{os.getpid()}.part')
    folder.mkdir()
    try:
        yield {kind: folder / path.name for kind, path in paths.items()}
        for path in paths.values():
            # With what GDAL keeps beside it.
            for file in (path, sidecar(path)):
                part = folder / file.name
                if part.exists():
                    part.replace(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sidecar(path: Path) -> Path:
    """Where GDAL keeps what it finds no place for in the file itself."""
    return path.with_name(f'{path.name}.aux.xml')


def _is_running(pid: int) -> bool:
    """Whether another process has this number."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's
    return True
