# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Tells data sets that are drawn anew in each epoch which epoch it is."""

from collections.abc import Iterator
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner
from mmseg.registry import HOOKS


@HOOKS.register_module()
class SetEpochHook(Hook):
    """Calls ``set_epoch`` of the training data, inside wrappers too.

    For runs of epochs; see :class:`infsa_seg.datasets.LargeRasters`. A run of
    iterations has none to count.
    """

    def before_train_epoch(self, runner: Runner) -> None:
        """Tell the epoch, from 0 on."""
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            for dataset in _datasets(runner.train_dataloader.dataset):
                if hasattr(dataset, 'set_epoch'):
                    dataset.set_epoch(runner.epoch)


def _datasets(dataset: Any) -> Iterator[Any]:
    """A data set and those that it wraps or joins."""
    yield dataset
    inner = getattr(dataset, 'datasets', None)
    for part in inner or [getattr(dataset, 'dataset', None)]:
        if part is not None:
            yield from _datasets(part)
