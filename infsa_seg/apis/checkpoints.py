# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one kind into another."""

from pathlib import Path

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
