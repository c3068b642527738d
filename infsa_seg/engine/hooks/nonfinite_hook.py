# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Stops training at a loss or a gradient that is infinite or no number."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.dist import all_gather_object, all_reduce, get_rank
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from mmseg.registry import HOOKS
from torch import Tensor
from torch.optim import Optimizer


class NonFiniteError(ValueError):
    """A loss or the gradient is infinite or no number.

    The message has one line: the iteration, what is not finite, the files of
    the batch on each rank that has it, and the last good checkpoint.
    """


class _Report(NamedTuple):
    """What one rank has found.

    Attributes:
        rank (int): Its number.
        losses (list[str]): Those that are not finite, as ``name=value``.
        batch (list[str]): Its images.
    """

    rank: int
    losses: list[str]
    batch: list[str]


@HOOKS.register_module()
class NonFiniteHook(Hook):
    """Stops training on all ranks where a loss or the gradient is not finite.

    It looks at the gradient before the optimizer does, which then leaves the
    weights as they are. No hook after it sees the iteration, so that nothing
    of it is averaged or saved. Scaling of the loss by a scale that adapts
    itself (``AmpOptimWrapper``, DeepSpeed's fp16) goes through infinite
    gradients on purpose and skips them: there only losses are looked at.
    DeepSpeed skips such steps in any precision, silently; here they end the
    training.

    Args:
        interval (int): Steps of the optimizer between two looks at the
            gradient, which read it once and wait for the device. With more
            than 1, a step in between can ruin the weights and be saved
            before a loss tells of it. Losses are looked at in every
            iteration.
    """

    priority = 'VERY_HIGH'

    def __init__(self, interval: int = 1) -> None:
        if interval < 1:
            raise ValueError(f'interval={interval}: give 1 or more')
        self.interval = interval
        self._steps = 0
        self._dropped = False
        self._handles: list[Any] = []

    def before_train(self, runner: Runner) -> None:
        """Attach to the optimizers; DeepSpeed's are asked afterwards."""
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step)
            for optimizer in _optimizers(runner)
            if isinstance(optimizer, Optimizer)
        ]

    def after_train(self, runner: Runner) -> None:
        """Detach."""
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        # Set by a scaler that lets a fused optimizer decide.
        if getattr(optimizer, 'found_inf', None) is not None:
            return
        self._steps += 1
        if self._steps % self.interval:
            return
        if not _is_finite(
            p.grad
            for group in optimizer.param_groups
            for p in group['params']
            if p.grad is not None
        ):
            self._dropped = True
            # Parameters without a gradient are not touched.
            optimizer.zero_grad(set_to_none=True)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Agree with all ranks whether to go on.

        Raises:
            NonFiniteError: On all ranks, if any has found something.
        """
        losses = {
            name: torch.as_tensor(value).detach()
            for name, value in (outputs or {}).items()
            if 'loss' in name
        }
        bad_gradient = self._dropped or self._deepspeed_skipped(runner)
        bad = torch.tensor(bad_gradient)
        if losses:
            device = next(iter(losses.values())).device
            values = torch.stack(
                [v.float().mean().to(device) for v in losses.values()]
            )
            bad = ~values.isfinite().all() | bad.to(values.device)
        bad = bad.int()
        all_reduce(bad, 'max')
        if not bad.item():
            return
        report = _Report(
            get_rank(),
            [
                f'{name}={value.float().mean().item()}'
                for name, value in losses.items()
                if not value.isfinite().all()
            ],
            _name_batch(data_batch),
        )
        raise NonFiniteError(
            f'iteration {runner.iter + 1}: '
            f'{_describe(all_gather_object(report))}; '
            f'{_last_checkpoint(runner)}'
        )

    def _deepspeed_skipped(self, runner: Runner) -> bool:
        for optimizer in _optimizers(runner):
            if isinstance(optimizer, Optimizer) or _adapts_scale(optimizer):
                continue
            if getattr(optimizer, 'overflow', False):
                return True
            norm = runner.model.get_global_grad_norm()
            look = (runner.iter + 1) % self.interval == 0
            if look and norm is not None and not math.isfinite(norm):
                return True
        return False


def _optimizers(runner: Runner) -> list[Any]:
    wrapper = runner.optim_wrapper
    if isinstance(wrapper, OptimWrapperDict):
        return [part.optimizer for part in wrapper.values()]
    return [wrapper.optimizer]


def _adapts_scale(optimizer: Any) -> bool:
    """Whether an optimizer of DeepSpeed finds the scale of the loss."""
    config = getattr(optimizer, 'loss_scale_config', optimizer)
    return bool(getattr(config, 'dynamic_loss_scale', False))


def _is_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all numbers are finite; waits for the device once.

    Numbers whose squares are infinite count as such: optimizers square them.
    """
    tensors = list(grads)
    if not tensors:
        return True
    norms = torch._foreach_norm(tensors)
    return bool(
        torch.cat([norm.reshape(1).to(norms[0].device) for norm in norms])
        .isfinite()
        .all()
    )


def _name_batch(data_batch: Any) -> list[str]:
    if not isinstance(data_batch, dict):
        return []
    samples = data_batch.get('data_samples')
    if not isinstance(samples, (list, tuple)):
        return []
    return [_name(getattr(sample, 'metainfo', {})) for sample in samples]


def _name(meta: dict) -> str:
    """An image by its file, else its number, and the part of it."""
    name = meta.get('img_path')
    if name is None:
        name = f'sample {meta.get("sample_idx", "without a name")}'
    window = meta.get('window')
    if window is None:
        return str(name)
    row, col, height, width = window
    return f'{name} ({height}x{width} at row {row}, column {col})'


def _describe(reports: list[_Report]) -> str:
    guilty = [report for report in reports if report.losses]
    if guilty:
        what = 'a loss is not finite'
    else:
        # Its parts are summed before anybody looks.
        what = 'the gradient is not finite, though the losses are'
        guilty = reports
    parts = []
    for report in guilty:
        where = f' of rank {report.rank}' if len(reports) > 1 else ''
        losses = f'{", ".join(report.losses)} ' if report.losses else ''
        names = ', '.join(report.batch) or 'unknown'
        parts.append(f'{losses}with the batch{where}: {names}')
    return f'{what}: {"; ".join(parts)}'


def _last_checkpoint(runner: Runner) -> str:
    info = runner.message_hub.runtime_info
    path = info.get('last_ckpt')
    if path is None or not Path(path).exists():
        return 'there is no good checkpoint yet'
    return f'the last good checkpoint is {path}'
