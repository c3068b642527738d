# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Averaged weights, under ZeRO too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmengine.hooks import EMAHook as BaseEMAHook
from mmengine.runner import Runner
from mmseg.registry import HOOKS
from torch import Tensor, nn

from .common import bare_model, uses_deepspeed

_KEY = 'ema_state_dict'


@HOOKS.register_module()
class EMAHook(BaseEMAHook):
    """mmengine's ``EMAHook``, which works under ZeRO of stages 0 to 2 too.

    Without DeepSpeed it is the base. With it,

    * the average is saved in the folders of ZeRO, and training goes on with
      it; upstream begins a new one. What ``save_best`` saves is the average.
    * weights in half precision are averaged in float32: a step of the average
      is smaller than what they can tell apart.

    Args:
        **kwargs: As for mmengine's.
    """

    src_model: Any
    _deepspeed = False
    _aside: list[Tensor] | None = None

    def before_run(self, runner: Runner) -> None:
        """Copy the model, and what a checkpoint has of its average.

        Raises:
            ValueError: ZeRO has divided the weights.
        """
        if any(hasattr(p, 'ds_id') for p in bare_model(runner).parameters()):
            raise ValueError(
                'EMAHook: ZeRO stage 3 divides the weights, and no process '
                'can average them; use stage 2, or leave the hook out'
            )
        super().before_run(runner)
        self._deepspeed = uses_deepspeed(runner)
        if not self._deepspeed:
            return
        self.ema_model.float()
        state = self.ema_model.state_dict()
        hub = runner.message_hub
        if _KEY in hub.runtime_info:
            self.ema_model.load_state_dict(hub.get_info(_KEY))
        # These tensors are the average itself. They are copied when the hub
        # is saved, the only way into a folder of ZeRO.
        hub.update_info(_KEY, state)

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        """Take the weights into the average."""
        model = self.src_model
        if self._deepspeed:
            self.src_model = _InFloat32(model)
        try:
            super().after_train_iter(*args, **kwargs)
        finally:
            self.src_model = model

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Put the average into a plain checkpoint, once."""
        checkpoint.get('message_hub', {}).get('runtime_info', {}).pop(
            _KEY, None
        )
        super().before_save_checkpoint(runner, checkpoint)

    def _swap_ema_parameters(self) -> None:
        if not self._deepspeed:
            super()._swap_ema_parameters()
            return
        # The average must not go through half precision and back.
        model, average = self.src_model, self.ema_model.module
        values = [*model.parameters(), *model.buffers()]
        if self._aside is None:
            self._aside = [value.detach().clone() for value in values]
            others = [*average.parameters(), *average.buffers()]
        else:
            others, self._aside = self._aside, None
        for value, other in zip(values, others, strict=True):
            value.data.copy_(other)


class _InFloat32:
    """What an averaged model reads of its source."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._model.named_parameters():
            yield name, _to_float32(value.detach())

    def buffers(self) -> Iterator[Tensor]:
        for value in self._model.buffers():
            yield _to_float32(value)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            name: _to_float32(value)
            for name, value in self._model.state_dict().items()
        }


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
