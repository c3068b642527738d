# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one kind into another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from infsa_seg.engine import ZeroFolder


def convert_zero(folder: str | Path, out: str | Path) -> None:
    """Make one plain checkpoint of a folder that ZeRO saved.

    Runs on the CPU, in one process, whatever saved the folder.

    Args:
        folder (str | Path): Such as ``work_dirs/NAME/iter_8000.pth``.
        out (str | Path): File to write: all weights and buffers under
            ``state_dict``, in float32 where they were in half precision, and
            ``meta`` with classes and palette.

    Raises:
        FileNotFoundError: There is no such folder.
        ImportError: DeepSpeed is not installed.
        ValueError: It is no checkpoint of ZeRO, or a damaged one; or ``out``
            is a folder.
    """
    if Path(out).is_dir():
        raise ValueError(f'{out}: a folder; name the file to write')
    ZeroFolder(folder).convert(out)


@contextmanager
def plain_file(checkpoint: str | Path, folder: str | Path) -> Iterator[str]:
    """The checkpoint; where it is a folder of ZeRO, a file of it meanwhile.

    Args:
        checkpoint (str | Path): A file, an address, or a folder of ZeRO.
        folder (str | Path): Where that file is to be. It may be large, and a
            system's directory for such files is often not.

    Raises:
        As for :func:`convert_zero`.
    """
    if not Path(checkpoint).is_dir():
        yield str(checkpoint)
        return
    saved = ZeroFolder(checkpoint)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix='.zero-', dir=folder) as name:
        file = str(Path(name, 'weights.pth'))
        saved.convert(file)
        yield file
