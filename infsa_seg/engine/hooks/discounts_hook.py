# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Shows in the log how far each attention layer looks."""

from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.registry import HOOKS
from torch import Tensor, nn

from .common import bare_model, log_interval


@HOOKS.register_module()
class DiscountsHook(Hook):
    """Logs the discount gamma of each attention layer that learns one.

    ``gamma/03_mean``, ``gamma/03_min`` and ``gamma/03_max`` are over the
    heads of the fourth layer. :class:`infsa_seg.engine.ShortLogProcessor`
    keeps them out of the line of the iteration; a line of their own has them
    all.

    Args:
        interval (int, optional): Iterations between two readings, which wait
            for the device. Defaults to that of the log.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval

    def before_train(self, runner: Runner) -> None:
        """Find out how often to read."""
        if self.interval is None:
            self.interval = log_interval(runner)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Read the discounts; on all ranks, where ZeRO has divided them."""
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        discounts = read_discounts(bare_model(runner))
        parts = []
        for index, heads in discounts.items():
            numbers = {
                'mean': heads.mean().item(),
                'min': heads.min().item(),
                'max': heads.max().item(),
            }
            for name, value in numbers.items():
                key = f'train/gamma/{index:02d}_{name}'
                runner.message_hub.update_scalar(key, value)
            mean, least, most = numbers.values()
            parts.append(f'{index}: {mean:.3f} ({least:.3f} to {most:.3f})')
        if parts:
            runner.logger.info(
                f'gamma by layer, mean (heads): {", ".join(parts)}'
            )


def read_discounts(model: nn.Module) -> dict[int, Tensor]:
    """The discounts of each attention layer that learns them.

    Args:
        model (nn.Module): Any; ZeRO may have divided it.

    Returns:
        dict[int, Tensor]: (H,) float32 on the CPU by the number of the layer,
        counted among all layers of attention.
    """
    logits: dict[int, Any] = {
        index: logit
        for index, logit in enumerate(
            module.discount_logit
            for module in model.modules()
            if hasattr(module, 'discount_logit')
        )
        if logit is not None
    }
    divided = [p for p in logits.values() if hasattr(p, 'ds_id')]
    if divided:
        import deepspeed

        with deepspeed.zero.GatheredParameters(divided):
            return _sigmoids(logits)
    return _sigmoids(logits)


def _sigmoids(logits: dict[int, Tensor]) -> dict[int, Tensor]:
    if not logits:
        return {}
    sizes = [logit.numel() for logit in logits.values()]
    flat = torch.cat([p.detach().float().flatten() for p in logits.values()])
    parts = flat.sigmoid().cpu().split(sizes)
    return dict(zip(logits, parts, strict=True))
