# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Samples that are a function of a seed and of their place in the series.

Whatever is drawn for a sample (flips, crops, colours) depends on neither the
process nor the worker that makes it. So a training that goes on sees what it
would have seen, and the processes that share an image make the same choices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.structures import PixelData
from mmseg.registry import DATA_SAMPLERS, DATASETS
from torch.utils.data import Dataset, Sampler

from infsa_seg.ops.rows import Rows, split_rows

# Whoever gives a part of an image to these gets a part of what they make of
# the whole.
_PLACELESS = ('PackSegInputs', 'PhotoMetricDistortion')


@dataclass(frozen=True)
class CropShare:
    """The rows of every crop that one process trains on.

    Crops are cut into bands of whole patches, as
    :class:`infsa_seg.execution.SpatialParallel` does. A crop that is smaller
    than it should be counts as padded below and at the right.

    Attributes:
        rank, size: of this process in its spatial group, and of the group.
        crop: height and width in pixels, after padding.
        patch_size: side of a token in pixels.
    """

    rank: int
    size: int
    crop: tuple[int, int]
    patch_size: int

    @property
    def rows(self) -> Rows:
        """Pixel rows of the padded crop."""
        height, patch = self.crop[0], self.patch_size
        band = split_rows(-(-height // patch), self.size)[self.rank]
        return Rows(band.start * patch, min(band.stop * patch, height))

    def within(self, height: int) -> Rows:
        """Those of them that an image of ``height`` pixels has; maybe none.

        Raises:
            ValueError: The image is higher than the crop.
        """
        if height > self.crop[0]:
            raise ValueError(
                f'an image of {height} rows is higher than the crops of '
                f'{self.crop[0]}, data_preprocessor.size; crop it in the '
                'training pipeline'
            )
        rows = self.rows
        return Rows(min(rows.start, height), min(rows.stop, height))

    def to_read(self, height: int) -> Rows:
        """As :meth:`within`, but the first row where there is none.

        Libraries know no pictures without pixels. ``img_shape`` tells
        :class:`SeededDataset` that the row is not wanted.
        """
        rows = self.within(height)
        return rows if rows.num_rows else Rows(0, 1)


class Draw(int):
    """The index of an item, with what to make of it.

    Args:
        index (int): Of the item in its dataset.
        seed (int): Of all random choices.
        share (CropShare, optional): The rows that are wanted; None for all.
    """

    seed: int
    share: CropShare | None

    def __new__(
        cls, index: int, seed: int, share: CropShare | None = None
    ) -> Draw:
        """Make one."""
        self = super().__new__(cls, index)
        self.seed, self.share = seed, share
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return int(self), self.seed, self.share


@DATA_SAMPLERS.register_module()
class SeededSampler(Sampler):
    """mmengine's ``InfiniteSampler``, which can begin anywhere.

    Args:
        dataset (Sized): The dataset.
        shuffle (bool): Go through it in another order each time.
        seed (int, optional): Of the order and of all samples, the same on
            all processes. Defaults to None, one that is drawn.
        group_size (int): Processes, neighbours in rank, that get the same
            samples. Defaults to 1.

    Attributes:
        seed (int): The seed.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        group_size: int = 1,
    ) -> None:
        self.dataset, self.shuffle = dataset, shuffle
        self.seed = sync_random_seed() if seed is None else seed
        rank, world_size = get_dist_info()
        self._group = rank // group_size
        self._groups = world_size // group_size
        self._start = 0

    def start(self, seed: int, position: int) -> None:
        """Begin with another sample, when next iterated.

        Args:
            seed (int): Of the series.
            position (int): Number of samples of this process to leave out;
                they are not read.
        """
        self.seed, self._start = seed, position

    def __iter__(self) -> Iterator[Draw]:
        """Yield without end."""
        size, epoch = len(self.dataset), -1
        place = self._start * self._groups + self._group
        while True:
            if place // size != epoch:
                epoch = place // size
                order = self._order(epoch)
            yield Draw(order[place % size], mix_seed(self.seed, place))
            place += self._groups

    def _order(self, epoch: int) -> np.ndarray:
        size = len(self.dataset)
        if not self.shuffle:
            return np.arange(size)
        return np.random.default_rng((self.seed, epoch)).permutation(size)

    def __len__(self) -> int:
        """Length of the dataset."""
        return len(self.dataset)


def mix_seed(*numbers: int) -> int:
    """One seed of 32 bits made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@DATASETS.register_module()
class SeededDataset(Dataset):
    """Any dataset, its random choices made by the seeds of the sampler.

    With ``share``, its samples are the rows of one process. Where only the
    first transform looks at places, and can read a part, no more is read;
    else the whole sample is made and cut.

    Args:
        dataset (dict | Dataset): What is wrapped; its samples are those of
            mmsegmentation.
        share (dict, optional): Arguments of :class:`CropShare`.
    """

    def __init__(
        self, dataset: dict | Dataset, share: dict[str, Any] | None = None
    ) -> None:
        if isinstance(dataset, dict):
            dataset = DATASETS.build(dataset)
        self.dataset: Any = dataset
        self.share = CropShare(**share) if share else None
        self.reads_share = self.share is not None and _reads_share(dataset)

    @property
    def metainfo(self) -> dict[str, Any]:
        """That of the dataset."""
        return self.dataset.metainfo

    def full_init(self) -> None:
        """Get the dataset ready."""
        if hasattr(self.dataset, 'full_init'):
            self.dataset.full_init()

    def __len__(self) -> int:
        """Its length."""
        return len(self.dataset)

    def __getitem__(self, index: Draw) -> Any:
        """Make a sample.

        Raises:
            ValueError: It is higher than the crops that are shared.
        """
        random.seed(index.seed)
        np.random.seed(index.seed)
        torch.manual_seed(index.seed)
        if self.share is None:
            return self.dataset[int(index)]
        if self.reads_share:
            sample = self.dataset[Draw(index, index.seed, self.share)]
            return _cut(sample, Rows(0, sample['data_samples'].img_shape[0]))
        sample = self.dataset[int(index)]
        return _cut(sample, self.share.within(sample['inputs'].shape[1]))


def _reads_share(dataset: Any) -> bool:
    """Whether a part that is read is a part of the sample."""
    pipeline = getattr(getattr(dataset, 'pipeline', None), 'transforms', [])
    readers = [getattr(t, 'reads_share', False) for t in pipeline]
    if not getattr(dataset, 'passes_share', False) or True not in readers:
        return False
    rest = pipeline[readers.index(True) + 1 :]
    return all(type(t).__name__ in _PLACELESS for t in rest)


def _cut(sample: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Take rows out of a sample of mmsegmentation."""
    data, part = sample['data_samples'], slice(*rows)
    for name, field in data.items():
        if isinstance(field, PixelData):
            data.set_field(field[part, :], name)
    return {'inputs': sample['inputs'][:, part], 'data_samples': data}
