# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Hidden files, in which a file is written until it is complete."""

from __future__ import annotations

import errno
import glob
import os
from pathlib import Path

from .writer import _is_running


def make_part(path: Path, overwrite: bool, suffix: str = '') -> Path:
    """Make sure of the place of a file before any work is done.

    Its directory is made if need be. Hidden files of processes that are no
    more are removed.

    Args:
        path: Where the file belongs.
        overwrite: Whether it may exist.
        suffix: Of the hidden file.

    Returns:
        The hidden file beside it, empty.

    Raises:
        FileExistsError: It exists, and must not.
        OSError: The directory cannot be written to.
    """
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), str(path)
        )
    if path.exists() and not overwrite:
        raise FileExistsError(
            errno.EEXIST, 'exists; use --overwrite', str(path)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in parts_of(path, '*'):
        owner = stale.name[len(path.name) + 2 :].partition('.')[0]
        if owner.isdecimal() and not _is_running(int(owner)):
            stale.unlink(missing_ok=True)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part{suffix}')
    try:
        part.touch()
    except OSError as error:
        raise OSError(
            error.errno, f'cannot be written: {error.strerror}', str(path)
        ) from error
    return part


def parts_of(path: Path, owner: str | None = None) -> list[Path]:
    """The hidden files of a file, with those that SQLite has beside them.

    Args:
        path: Where the file belongs.
        owner: Number of the process that made them, this one if None.
    """
    name, owner = glob.escape(path.name), owner or str(os.getpid())
    return list(path.parent.glob(f'.{name}.{owner}.part*'))
