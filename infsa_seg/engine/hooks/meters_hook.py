# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Shows in the log how fast training is, and what it takes."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.registry import HOOKS

from .common import bare_model, log_interval, spatial_parallel

_MIB = 2**20


@HOOKS.register_module()
class MetersHook(Hook):
    """Logs speed, memory and messages, of all ranks together.

    * ``tokens_per_s``: tokens of all images (before they are padded to one
      size) over the time that ``IterTimerHook`` measured, loading included,
      since the line before. Ranks that share an image have a band of it each.
    * ``memory``: MiB that the process has held at most, of the rank that
      held the most. On GPUs mmengine logs that of the device by this name.
    * ``merge_bytes``, ``halo_bytes``: what the busiest rank has sent of
      attention states and of rows in this iteration, where images are shared
      between ranks.

    Args:
        interval (int, optional): Iterations between two readings. Defaults
            to that of the log.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        self._tokens = 0
        self._seconds = 0.0

    def before_train(self, runner: Runner) -> None:
        """Find out how often to read."""
        if self.interval is None:
            self.interval = log_interval(runner)
        self._tokens, self._seconds = 0, 0.0

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Let the counters of messages begin at zero."""
        parallel = spatial_parallel(runner)
        if parallel is not None:
            parallel.traffic.reset()

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Count, and tell where the log is about to be written."""
        time = runner.message_hub.log_scalars.get('train/time')
        if time is not None:
            self._tokens += _count_tokens(runner, data_batch)
            self._seconds += time.current()
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        hub = runner.message_hub
        parallel = spatial_parallel(runner)
        tokens = torch.tensor(float(self._tokens), dtype=torch.float64)
        all_reduce(tokens)
        if tokens:
            hub.update_scalar(
                'train/tokens_per_s',
                round(tokens.item() / max(self._seconds, 1e-9)),
            )
        self._tokens, self._seconds = 0, 0.0
        traffic = getattr(parallel, 'traffic', None)
        peaks = torch.tensor(
            [
                _peak_bytes() // _MIB,
                traffic.merges.bytes if traffic else 0,
                traffic.halos.bytes if traffic else 0,
            ]
        )
        all_reduce(peaks, 'max')
        memory, merges, halos = peaks.tolist()
        if not torch.cuda.is_available():
            hub.update_scalar('train/memory', memory)
        if traffic is not None:
            hub.update_scalar('train/merge_bytes', merges)
            hub.update_scalar('train/halo_bytes', halos)


def _count_tokens(runner: Runner, data_batch: Any) -> int:
    model = bare_model(runner)
    patch = getattr(getattr(model, 'backbone', None), 'patch_size', None)
    if not isinstance(patch, int) or not isinstance(data_batch, dict):
        return 0
    return sum(
        -(-image.shape[-2] // patch) * -(-image.shape[-1] // patch)
        for image in data_batch['inputs']
    )


def _peak_bytes() -> int:
    """The most memory that this process has had, data workers not included."""
    status = Path('/proc/self/status')
    if status.exists():
        found = re.search(r'VmHWM:\s+(\d+) kB', status.read_text())
        if found:
            return 1024 * int(found[1])
    # Elsewhere; on Linux it begins with that of the process before.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else 1024 * peak
