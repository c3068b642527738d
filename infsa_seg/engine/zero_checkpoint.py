# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints: folders with a part from each process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch


def require_deepspeed() -> None:
    """Raise ImportError, in one line, where DeepSpeed is not installed."""
    if find_spec('deepspeed') is None:
        raise ImportError(
            'ZeRO needs DeepSpeed, which is not installed; run '
            "pip install 'infsa_seg[deepspeed]'"
        )


class ZeroFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def check(self) -> None: ...

    def check_fit(self, world_size: int, stage: int) -> None: ...


def save_zero(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its name and rename it when all are done.

    Args:
        path (Path): What it shall be called.
        write (callable): Writes this process's part into the folder given,
            and returns when all processes have.
    """
    from mmengine.dist import barrier, is_main_process

    part = path.with_name(f'.{path.name}.part')
    if is_main_process():
        shutil.rmtree(part, ignore_errors=True)
    barrier()
    write(part)
    barrier()
    if is_main_process():
        old = path.with_name(f'.{path.name}.old')
        if path.exists():
            path.replace(old)
        part.replace(path)
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    barrier()
