# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A training whose every iteration is a function of a seed and its number."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_dist_info
from mmengine.runner import IterBasedTrainLoop
from mmseg.registry import LOOPS
from torch.utils.data import DataLoader

from infsa_seg.execution import ParallelDims

_SEED = 'sample_seed'


@LOOPS.register_module()
class SeededTrainLoop(IterBasedTrainLoop):
    """mmengine's ``IterBasedTrainLoop``, which goes on exactly.

    The order of the samples, the random choices of their pipelines and those
    of the network depend on the seed and on the number of the iteration. A
    training that is resumed therefore does what it would have done, and what
    it has done is not read again: the base loads all samples since the first.

    Under a strategy with ``spatial_parallel_size`` the processes of a group
    get the rows of one sample, and make the same random choices.

    Args:
        runner: The runner.
        dataloader (dict | DataLoader): Its sampler has to be an
            ``InfiniteSampler``; it becomes a ``SeededSampler``, and the
            dataset a ``SeededDataset``.
        *args, **kwargs: As for the base.

    Raises:
        ValueError: Another sampler; or images are to be shared, and the size
            of the crops is not known.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: dict | DataLoader,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        strategy = getattr(runner, 'strategy', None)
        rank, world_size = get_dist_info()
        self._dims = getattr(strategy, 'dims', ParallelDims(world_size))
        self._data_rank = self._dims.data_rank(rank)
        if isinstance(dataloader, dict):
            share = None
            if self._dims.spatial > 1:
                share = _find_share(runner.cfg.model, self._dims, rank)
            dataloader = _seed_samples(dataloader, self._dims.spatial, share)
        super().__init__(runner, dataloader, *args, **kwargs)

    def run(self) -> Any:
        """Train, from the iteration on that a checkpoint has set."""
        sampler: Any = self.dataloader.sampler
        hub = self.runner.message_hub
        if self._iter:
            batch_size = self.dataloader.batch_size
            sampler.start(
                hub.runtime_info.get(_SEED, sampler.seed),
                self._iter * batch_size,
            )
            # Its workers end with it.
            del self.dataloader_iterator  # type: ignore[has-type]
            # The base throws away what it takes for samples that were seen.
            self.dataloader_iterator = itertools.chain(
                itertools.repeat(None, self._iter), iter(self.dataloader)
            )
        hub.update_info(_SEED, sampler.seed)
        return super().run()

    def run_iter(self, data_batch: Any) -> None:
        """Train on a batch."""
        # Dropped paths have to be the same on all who share an image.
        numbers = self.dataloader.sampler.seed, self._data_rank, self._iter
        state = np.random.SeedSequence(numbers).generate_state(1)
        torch.manual_seed(int(state[0]))
        super().run_iter(data_batch)


def _seed_samples(
    dataloader: dict, group_size: int, share: dict[str, Any] | None
) -> dict:
    cfg = copy.deepcopy(dataloader)
    kind = cfg.get('sampler', {}).get('type')
    if kind not in ('InfiniteSampler', 'SeededSampler'):
        raise ValueError(
            f'train_dataloader.sampler {kind}: SeededTrainLoop needs '
            "dict(type='InfiniteSampler', shuffle=True)"
        )
    cfg['sampler'].update(type='SeededSampler', group_size=group_size)
    cfg['dataset'] = dict(
        type='SeededDataset', dataset=cfg['dataset'], share=share
    )
    return cfg


def _find_share(model: dict, dims: ParallelDims, rank: int) -> dict[str, Any]:
    """The rows of a process, as arguments of ``CropShare``."""
    size = model.get('data_preprocessor', {}).get('size')
    if size is None:
        raise ValueError(
            f'spatial_parallel_size={dims.spatial} cuts all crops alike: say '
            'model.data_preprocessor.size=(height, width), that of the crops'
        )
    return dict(
        rank=dims.spatial_rank(rank),
        size=dims.spatial,
        crop=tuple(size),
        patch_size=model['backbone'].get('patch_size', 16),
    )
