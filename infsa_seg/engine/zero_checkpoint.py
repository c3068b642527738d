# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints: folders with a part from each process."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import barrier, is_main_process
from torch import Tensor

from infsa_seg.models.utils import check_checkpoint

from .files import atomic_path

CONVERTER = 'tools/model_converters/zero_to_fp32.py'
# Checkpoints of 1 and 2 look alike and can be exchanged.
_KINDS = {0: '0', 1: '1 or 2', 2: '1 or 2', 3: '3'}


def require_deepspeed() -> None:
    """Raise ImportError, in one line, where DeepSpeed is not installed."""
    if find_spec('deepspeed') is None:
        raise ImportError(
            'ZeRO needs DeepSpeed, which is not installed; run '
            "pip install 'infsa_seg[deepspeed]'"
        )


class ZeroFolder:
    """A checkpoint that ZeRO saved.

    DeepSpeed unpickles whatever it finds in such a folder. Here every file is
    first read in safe mode, where only DeepSpeed's own types may be in it.

    Args:
        path (str | Path): The folder, such as ``work_dirs/x/iter_8000.pth``.

    Attributes:
        world_size (int): Number of processes that saved it.
        kind (str): The stages that can go on from it: '0', '1 or 2' or '3'.
        meta (dict): What mmengine says of it, such as ``dataset_meta``.

    Raises:
        FileNotFoundError: There is no such folder.
        ImportError: DeepSpeed is not installed.
        ValueError: It is no checkpoint of ZeRO, is damaged, or holds types
            that could run code of others.
    """

    def __init__(self, path: str | Path) -> None:
        require_deepspeed()
        self.path = path = Path(path)
        _finish(path)
        if path.is_file():
            raise ValueError(
                f'{path}: a plain checkpoint, from which ZeRO cannot go on; '
                'begin with its weights: --cfg-options load_from=...'
            )
        if not path.is_dir():
            raise FileNotFoundError(f'{path}: no such checkpoint folder')
        models = sorted(path.glob('*_model_states.pt'))
        if not models:
            raise ValueError(
                f'{path}: no checkpoint of ZeRO, it has no *_model_states.pt'
            )
        optimizers = sorted(path.glob('*_optim_states.pt'))
        contents = [_read(file, 'meta') for file in models + optimizers]
        self._model = models[0]
        self.meta: dict[str, Any] = contents[0].get('meta', {})
        self.world_size = int(contents[0].get('dp_world_size', 0))
        if not optimizers:
            self.kind = '0'
        elif self._model.name.startswith('zero_pp_rank_'):
            self.kind = '3'
        else:
            self.kind = '1 or 2'
        missing = self.world_size - len(optimizers)
        if self.kind != '0' and missing:
            raise ValueError(
                f'{path}: {self.world_size} processes saved it, and it has '
                f'parts of {len(optimizers)}; copy it again, with all files'
            )

    def check_fit(self, world_size: int, stage: int) -> None:
        """Refuse to go on where DeepSpeed could not.

        Args:
            world_size (int): Number of processes of this run.
            stage (int): Its stage.

        Raises:
            ValueError: One of them is another than when it was saved.
        """
        if self.kind != _KINDS[stage]:
            raise ValueError(
                f'{self.path}: saved by ZeRO stage {self.kind}, and this run '
                f'has stage {stage}: {self._ways("in that stage")}'
            )
        if self.kind != '0' and self.world_size != world_size:
            raise ValueError(
                f'{self.path}: saved by {self.world_size} processes, and this '
                f'run has {world_size}: '
                f'{self._ways("with as many processes")}'
            )

    def _ways(self, same: str) -> str:
        return (
            f'go on {same}, or begin anew with its weights: {CONVERTER} '
            f'{self.path} OUT, then --cfg-options load_from=OUT'
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers, on the CPU, half precision as float32."""
        saved = _read(self._model, 'cpu')['module']
        state = {} if self.kind == '3' else dict(saved)
        if self.kind != '0':
            from deepspeed.utils import zero_to_fp32

            # It prints what it does.
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                state |= zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                    str(self.path.parent), tag=self.path.name
                )
        lost = sorted(set(saved) - set(state))
        if lost:
            raise ValueError(f'{self.path}: damaged, it has no {lost[0]}')
        return {name: as_plain(state[name]) for name in saved}

    def convert(self, out: str | Path) -> None:
        """Write a plain checkpoint, all or nothing: weights and ``meta``."""
        content = {'state_dict': self.state_dict(), 'meta': self.meta}
        with atomic_path(out) as part:
            torch.save(content, part)


def as_plain(value: Tensor) -> Tensor:
    """A tensor of its own, on the CPU; half precision becomes float32."""
    half = value.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half else value.dtype
    return value.detach().to('cpu', dtype, copy=True)


def _read(path: Path, device: str) -> dict[str, Any]:
    """A file in safe mode; with device 'meta' without its numbers."""
    from deepspeed.runtime.fp16.loss_scaler import (
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
    check_checkpoint(path)
    return torch.load(path, map_location=device, weights_only=True)


def save_zero(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its name; it gets its name when all are done.

    Args:
        path (Path): What it shall be called. What has that name is replaced.
        write (callable): Writes this process's part into the folder given,
            and returns when all processes have.
    """
    part = path.with_name(f'.{path.name}.part')
    old = _old(path)
    if is_main_process():
        # Of a run that was killed.
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    barrier()
    write(part)
    barrier()
    if is_main_process():
        if path.is_dir():
            path.replace(old)
        else:
            path.unlink(missing_ok=True)
        part.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    barrier()


def _old(path: Path) -> Path:
    """Where a folder is until the one that replaces it has its name."""
    return path.with_name(f'.{path.name}.old')


def _finish(path: Path) -> None:
    """Bring a folder back, where a kill came just before it was replaced."""
    if not path.exists():
        # There is none, or another process was faster.
        with contextlib.suppress(FileNotFoundError):
            _old(path).replace(path)
