# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""In which order pictures are seen."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from mmengine.dist import get_dist_info, sync_random_seed
from mmseg.registry import DATA_SAMPLERS
from torch.utils.data import Sampler


@DATA_SAMPLERS.register_module()
class RepeatedAugSampler(Sampler):
    """Each picture several times in a row, differently augmented.

    Repeated augmentation as DeiT has it: pictures are shuffled, each is
    repeated, the ranks take turns, so that the repeats of a picture lie on
    different ranks where there are as many, and an epoch ends after as many
    draws as there are pictures. It so sees a part of them.

    Args:
        dataset (Sized): The pictures.
        num_repeats (int): How often each comes. Defaults to 3.
        shuffle (bool): Another order in each epoch. Defaults to True.
        seed (int, optional): Of the order, the same on all ranks. Defaults to
            None: drawn by one of them.
        selected_round (int): An epoch has so many draws or a multiple, on
            all ranks together, if there are so many pictures.
            Defaults to 256.
    """

    def __init__(
        self,
        dataset: Sized,
        num_repeats: int = 3,
        shuffle: bool = True,
        seed: int | None = None,
        selected_round: int = 256,
    ) -> None:
        self.rank, self.world_size = get_dist_info()
        self.dataset = dataset
        self.num_repeats = num_repeats
        self.shuffle = shuffle
        self.seed = sync_random_seed() if seed is None else seed
        self.epoch = 0
        total = len(dataset)
        if total > selected_round:
            total -= total % selected_round
        self.num_samples = total // self.world_size

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator)
        else:
            order = torch.arange(count)
        repeated = order.repeat_interleave(self.num_repeats)
        mine = repeated[self.rank :: self.world_size]
        return iter(mine[: self.num_samples].tolist())

    def __len__(self) -> int:
        """Draws of this rank in an epoch."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of each epoch."""
        self.epoch = epoch
