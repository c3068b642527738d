# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Samples as a function of seed and place, and parts of them."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.dataset import pseudo_collate
from mmseg.registry import DATASETS
from torch.utils.data import DataLoader

from infsa_seg.datasets import (
    CropShare,
    Draw,
    SeededDataset,
    SeededSampler,
    seeded,
)
from infsa_seg.execution import Grid
from infsa_seg.ops import split_rows

from .test_large_rasters import CLASSES, arrays, build, root  # noqa: F401

DIRECTIONS = ['horizontal', 'vertical', 'diagonal']


def take(sampler, count):
    return list(itertools.islice(sampler, count))


class TestSampler:
    def test_every_item_once_in_a_new_order_each_time(self):
        draws = take(SeededSampler(range(7), seed=3), 21)
        rounds = [draws[i : i + 7] for i in (0, 7, 14)]
        assert all(sorted(r) == list(range(7)) for r in rounds)
        assert len({tuple(r) for r in rounds}) == 3
        assert len({draw.seed for draw in draws}) == 21

    def test_in_order(self):
        sampler = SeededSampler(range(3), shuffle=False, seed=0)
        assert take(sampler, 5) == [0, 1, 2, 0, 1]
        assert len(sampler) == 3

    @given(st.integers(0, 40), st.integers(1, 9), st.booleans())
    def test_begins_anywhere(self, skip, size, shuffle):
        whole = take(SeededSampler(range(size), shuffle, seed=5), skip + 10)
        sampler = SeededSampler(range(size), shuffle, seed=1)
        sampler.start(5, skip)
        part = take(sampler, 10)
        assert part == whole[skip:]
        assert [d.seed for d in part] == [d.seed for d in whole[skip:]]

    def test_groups_get_the_same_and_share_what_there_is(self, monkeypatch):
        def of(rank, size, group_size):
            monkeypatch.setattr(seeded, 'get_dist_info', lambda: (rank, size))
            sampler = SeededSampler(range(11), seed=2, group_size=group_size)
            return [(int(d), d.seed) for d in take(sampler, 20)]

        whole = of(0, 1, 1)
        ranks = [of(rank, 6, 3) for rank in range(6)]
        assert ranks[0] == ranks[1] == ranks[2]
        assert ranks[3] == ranks[4] == ranks[5]
        both = list(zip(ranks[0], ranks[3], strict=True))
        assert list(itertools.chain(*both))[:20] == whole

    def test_a_draw_travels_to_workers(self):
        draw = Draw(4, 9, CropShare(1, 2, (20, 10), 4))
        copy = pickle.loads(pickle.dumps(draw))
        assert copy == draw == 4
        assert (copy.seed, copy.share) == (9, draw.share)


class TestShare:
    @given(st.integers(1, 90), st.integers(1, 6), st.integers(1, 9))
    def test_is_what_the_executor_expects(self, height, size, patch):
        grid = Grid(height, 8, patch)
        shares = [CropShare(r, size, (height, 8), patch) for r in range(size)]
        assert [share.rows for share in shares] == [
            grid.pixel_rows(band) for band in split_rows(grid.rows, size)
        ]

    @given(st.integers(1, 50), st.integers(0, 9), st.integers(1, 5))
    def test_of_a_smaller_image(self, height, less, size):
        parts = [
            CropShare(rank, size, (height + less, 8), 3).within(height)
            for rank in range(size)
        ]
        rows = [row for part in parts for row in range(*part)]
        assert rows == list(range(height))

    def test_of_a_larger_image(self):
        with pytest.raises(ValueError, match='101 rows is higher than the c'):
            CropShare(0, 2, (100, 50), 4).within(101)


class Choices:
    """A dataset that shows what is drawn for an item."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return (
            index,
            random.random(),
            np.random.random(),
            torch.rand(()).item(),
        )


@pytest.mark.parametrize('num_workers', [0, 1, 3])
def test_choices_know_no_worker(num_workers):
    dataset = SeededDataset(Choices())
    loader = DataLoader(
        dataset,
        batch_size=2,
        sampler=SeededSampler(dataset, seed=1),
        num_workers=num_workers,
        collate_fn=pseudo_collate,
    )
    batches = itertools.islice(loader, 4)
    got = [item for batch in batches for item in zip(*batch, strict=True)]
    wanted = [
        dataset[draw] for draw in take(SeededSampler(dataset, seed=1), 8)
    ]
    assert got == wanted
    assert len({item[1] for item in got}) == 8


def shares(dataset, crop, size, draw, patch=4):
    """What each process makes of a draw."""
    result = []
    for rank in range(size):
        cfg = dict(rank=rank, size=size, crop=crop, patch_size=patch)
        part = SeededDataset(dataset, cfg)
        result.append((part, part[draw]))
    return result


def assert_parts(whole, parts):
    pixels = torch.cat([p['inputs'] for p in parts], 1)
    labels = [p['data_samples'].gt_sem_seg.data for p in parts]
    assert torch.equal(pixels, whole['inputs'])
    wanted = whole['data_samples'].gt_sem_seg.data
    assert torch.equal(torch.cat(labels, 1), wanted)


@pytest.mark.parametrize('flip', [None, *DIRECTIONS])
@pytest.mark.parametrize('window', [(24, 32), (50, 60)])
def test_rows_of_rasters(root, monkeypatch, flip, window):  # noqa: F811
    """Windows lie within rasters, or are higher than one of them."""
    pipeline = [
        dict(type='LoadWindow'),
        dict(type='PhotoMetricDistortion'),
        dict(type='PackSegInputs'),
    ]
    if flip:
        pipeline.insert(0, dict(type='DrawFlip', prob=1.0, direction=flip))
    dataset = build(root, mode='random', window=window, pipeline=pipeline)
    for index in range(6):
        draw = Draw(index, 7 + index)
        whole = SeededDataset(dataset)[draw]
        got = shares(dataset, window, 3, draw)
        assert all(part.reads_share for part, _ in got)
        assert_parts(whole, [sample for _, sample in got])


def test_no_other_rows_are_read(root, monkeypatch):  # noqa: F811
    pipeline = [dict(type='LoadWindow'), dict(type='PackSegInputs')]
    dataset = build(root, window=(24, 32), pipeline=pipeline)
    rasters = dataset.pipeline.transforms[0].rasters
    heights = []
    get = rasters.get

    def watched(path, **kwargs):
        reader = get(path, **kwargs)
        read = type(reader).read

        def count(self, window, *args):
            heights.append(window.height)
            return read(self, window, *args)

        monkeypatch.setattr(type(reader), 'read', count)
        monkeypatch.setattr(rasters, 'get', get)
        return reader

    monkeypatch.setattr(rasters, 'get', watched)
    shares(dataset, (24, 32), 3, Draw(0, 1))
    # Of image and mask, in patches of 4: two of six rows of patches each.
    assert heights == [8] * 6


def test_flips_are_those_of_mmcv(root):  # noqa: F811
    plain = [dict(type='LoadWindow'), dict(type='PackSegInputs')]
    flip = dict(prob=[0.25] * 3, direction=DIRECTIONS)
    before = build(root, pipeline=[dict(type='DrawFlip', **flip), *plain])
    after = build(root, pipeline=[*plain[:1], dict(type='RandomFlip', **flip)])
    after.pipeline.transforms.append(before.pipeline.transforms[-1])
    seen = set()
    for index in range(20):
        draw = Draw(index, index)
        mine, theirs = SeededDataset(before)[draw], SeededDataset(after)[draw]
        assert_parts(mine, [theirs])
        seen.add(theirs['data_samples'].flip_direction)
    assert seen == {None, *DIRECTIONS}


@pytest.mark.parametrize(
    'transform',
    [
        dict(type='RandomFlip', prob=0.5, direction='vertical'),
        dict(type='RandomCrop', crop_size=(20, 20)),
    ],
)
def test_what_depends_on_places_is_made_whole_and_cut(root, transform):  # noqa: F811
    pipeline = [
        dict(type='LoadWindow'),
        transform,
        dict(type='PackSegInputs'),
    ]
    dataset = build(root, window=(24, 32), pipeline=pipeline)
    for index in range(6):
        draw = Draw(index, index)
        got = shares(dataset, (24, 32), 2, draw)
        assert not any(part.reads_share for part, _ in got)
        assert_parts(SeededDataset(dataset)[draw], [s for _, s in got])


@pytest.mark.parametrize('crop_size', [None, (40, 48)])
def test_rows_of_scenes(crop_size):
    dataset = DATASETS.build(
        dict(
            type='SyntheticScenes',
            num_scenes=4,
            size=(60, 64),
            pipeline=[
                dict(type='LoadSyntheticScene', crop_size=crop_size),
                dict(type='PackSegInputs'),
            ],
        )
    )
    draw = Draw(2, 5)
    got = shares(dataset, crop_size or (60, 64), 3, draw, patch=8)
    assert all(part.reads_share for part, _ in got)
    assert_parts(SeededDataset(dataset)[draw], [s for _, s in got])


def test_wraps_any_dataset(root):  # noqa: F811
    cfg = build(root, lazy_init=True)
    dataset = SeededDataset(cfg)
    dataset.full_init()
    assert dataset.metainfo['classes'] == CLASSES
    assert len(dataset) == len(cfg)
