# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmseg.registry import DATA_SAMPLERS

from infsa_seg.datasets import RepeatedAugSampler, samplers


def plain_rule(count, repeats, rank, world, seed, epoch, selected_round):
    """DeiT's order, as one would say it."""
    generator = torch.Generator().manual_seed(seed + epoch)
    repeated = []
    for index in torch.randperm(count, generator=generator).tolist():
        repeated += [index] * repeats
    mine = [x for i, x in enumerate(repeated) if i % world == rank]
    selected = count
    if count > selected_round:
        selected = count // selected_round * selected_round
    return mine[: selected // world]


@pytest.mark.parametrize('count', [7, 30, 100])
@pytest.mark.parametrize('world', [1, 2, 3])
@pytest.mark.parametrize('repeats', [1, 3])
def test_the_order_is_that_of_the_rule(monkeypatch, count, world, repeats):
    for rank in range(world):
        monkeypatch.setattr(samplers, 'get_dist_info', lambda: (rank, world))  # noqa: B023
        sampler = RepeatedAugSampler(
            range(count), repeats, seed=5, selected_round=16
        )
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            expected = plain_rule(count, repeats, rank, world, 5, epoch, 16)
            assert list(sampler) == expected
            assert len(sampler) == len(expected)


def test_repeats_lie_on_different_ranks(monkeypatch):
    seen = []
    for rank in range(3):
        monkeypatch.setattr(samplers, 'get_dist_info', lambda: (rank, 3))  # noqa: B023
        seen.append(list(RepeatedAugSampler(range(30), 3, seed=0)))
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 10


def test_from_the_registry_in_order():
    sampler = DATA_SAMPLERS.build(
        dict(
            type='RepeatedAugSampler',
            dataset=range(4),
            num_repeats=2,
            shuffle=False,
            seed=None,
        )
    )
    assert list(sampler) == [0, 0, 1, 1]
