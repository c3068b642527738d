# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A hook that kills its process; see test_zero_interrupt.py."""

import os
import signal
from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmseg.registry import HOOKS


@HOOKS.register_module()
class DyingHook(Hook):
    """Dies once in each of some iterations.

    Args:
        deaths (dict[str, str]): What the last process does in an iteration:
            'step', it dies at its end; 'save', while it writes its part of
            the checkpoint.
    """

    priority = 'HIGH'

    def __init__(self, deaths):
        self.deaths = deaths

    def after_train_iter(self, runner, batch_idx, data_batch, outputs):
        how = self.deaths.get(str(runner.iter + 1))
        marker = Path(runner.work_dir, f'died_{runner.iter + 1}')
        if how is None or get_rank() != 1 or marker.exists():
            return
        marker.touch()
        if how == 'step':
            die()
        torch.save = save_half


def save_half(obj, path, *args, **kwargs):
    Path(path).write_bytes(b'half')
    die()


def die():
    os.kill(os.getpid(), signal.SIGKILL)
