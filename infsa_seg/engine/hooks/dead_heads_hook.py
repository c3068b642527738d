# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Shows in the log which attention heads found no positive score."""

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.registry import HOOKS

from .common import spatial_parallel


@HOOKS.register_module()
class DeadHeadsHook(Hook):
    """Logs ``dead_heads``: how often a head fell back to the mean.

    The attention layers count it in training, per image and head, from the
    start of the process on; see :class:`infsa_seg.layers.LinearInfSA`. It is
    that of all ranks together. A number that grows says that queries and keys
    have turned away from each other. It appears in the log once there is one.

    Args:
        interval (int): Iterations between two readings, which wait for the
            device.
    """

    def __init__(self, interval: int = 50) -> None:
        self.interval = interval

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict | None = None,
        outputs: dict | None = None,
    ) -> None:
        """Add up the counters, from the start of the run."""
        if not self.every_n_train_iters(runner, self.interval):
            return
        counts = [
            module.num_dead
            for module in runner.model.modules()
            if hasattr(module, 'num_dead')
        ]
        everywhere = torch.tensor(int(sum(counts)))
        all_reduce(everywhere)
        # Those who share an image have all found the same.
        total = int(everywhere) // getattr(spatial_parallel(runner), 'size', 1)
        if total:
            runner.message_hub.update_scalar('train/dead_heads', total)
