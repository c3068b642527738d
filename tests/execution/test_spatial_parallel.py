# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A group of ranks, a band on each, computes what one process computes."""

import pytest

from infsa_seg.execution import ParallelDims
from infsa_seg.execution.exchange import find_route
from infsa_seg.ops import split_rows

from . import spatial_ranks as ranks
from .networks import VARIANTS

SIZE = (53, 37)  # of 7 token rows, the last of them cut short
# Every variant with another mask in each band, under recomputation.
CASES = {
    f'{attention}-masked-recomputed': (
        ranks.equals_one_process,
        (attention, 'dwconv', 1, SIZE, True, True),
    )
    for attention in VARIANTS
}
CASES |= {
    'linear-mlp': (ranks.equals_one_process, ('linear', 'mlp')),
    'neumann-dwconv': (ranks.equals_one_process, ('neumann', 'dwconv', 2)),
    # Bands of one row and a halo of two: rows come from further ranks.
    'low-bands': (
        ranks.equals_one_process,
        ('linear', 'dwconv', 0, (30, 17), True, False),
    ),
    'losses': (ranks.losses_equal_one_process, ()),
    'only-ignored': (ranks.losses_equal_one_process, (True,)),
    'losses-dice': (ranks.losses_equal_one_process, (False, 'dice')),
    'losses-ohem': (ranks.losses_equal_one_process, (False, 'ohem')),
    'only-ignored-list': (ranks.losses_equal_one_process, (True, 'ohem')),
    'meshes': (ranks.meshes, ()),
}
COUNTED = {
    f'counted-{attention}-{size[0]}x{size[1]}-{recompute}': (
        ranks.counted,
        (attention, size, recompute),
    )
    for attention, size, recompute in (
        ('linear', (48, 32), False),
        ('linear', (96, 32), False),
        ('linear', (48, 64), False),
        ('row-inf', (48, 32), True),
        ('none', (53, 32), True),
    )
}
OTHERS = {
    'random_numbers': (ranks.random_numbers, ()),
    'refusals': (ranks.refusals, ()),
}
SLOW = {
    f'{attention}-{ffn}-{masked}-{recompute}': (
        ranks.equals_one_process,
        (attention, ffn, 2, SIZE, masked, recompute),
    )
    for attention in VARIANTS
    for ffn in ('mlp', 'dwconv')
    for masked in (False, True)
    for recompute in (False, True)
}


@pytest.fixture(scope='module', params=[2, 3])
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('ranks')
    return ranks.run_ranks(CASES | COUNTED | OTHERS, request.param, folder)


def check(outcomes, case):
    assert case in outcomes, 'an earlier case failed'
    errors = [x for x in outcomes[case] if isinstance(x, str)]
    assert not errors, errors[0]
    return outcomes[case]


@pytest.mark.parametrize('case', CASES)
def test_ranks_equal_one_process(outcomes, case):
    check(outcomes, case)


def test_merges_do_not_grow_with_the_image(outcomes):
    (small, *_), (high, *_), (wide, *_), *_ = (
        check(outcomes, case) for case in COUNTED
    )
    assert small[0] == high[0] == wide[0]
    # Two phases of three layers, forward and backward, and the tokens.
    assert small[0].calls == 2 * 3 * 2 + 1
    # Halo rows are as wide as the image, whatever its height.
    assert small[1] == high[1]
    assert 2 * small[1].elements == wide[1].elements


@pytest.mark.parametrize('case', COUNTED)
def test_communication_is_what_is_sent(outcomes, case):
    check(outcomes, case)


def test_ranks_share_random_numbers(outcomes):
    first, *others = check(outcomes, 'random_numbers')
    assert all(other == first for other in others)


def test_refusals(outcomes):
    for rank, messages in enumerate(outcomes['refusals']):
        few, other, halo = messages
        assert '1 token rows, fewer than the' in few
        assert 'pixels has (5, 16) rows and columns' in other
        assert f'rank {rank} has 9 rows' in halo


@pytest.mark.slow
@pytest.mark.parametrize('size', [2, 3])
def test_many_cases(size, tmp_path):
    results = ranks.run_ranks(SLOW, size, tmp_path)
    for case in SLOW:
        check(results, case)


@pytest.mark.slow
def test_two_groups_beside_each_other(tmp_path):
    cases = {'groups': (ranks.two_data_ranks, ())}
    check(ranks.run_ranks(cases, 4, tmp_path), 'groups')


@pytest.mark.parametrize('size', [2, 4, 8])
def test_the_table_in_the_documents(size):
    text = ranks.ROOT / 'docs' / 'spatial_parallel.md'
    assert ranks.table_row(size) in text.read_text(encoding='utf-8')


@pytest.mark.parametrize('n', [0, 1, 2, 5, 99])
@pytest.mark.parametrize(('rows', 'size'), [(7, 3), (3, 3), (20, 4), (5, 1)])
def test_routes_give_every_row_that_is_needed(rows, size, n):
    bands = split_rows(rows, size)
    routes = [find_route(bands, rank, n) for rank in range(size)]
    for rank, route in enumerate(routes):
        got = [*route.above, (rank, route.band), *route.below]
        covered = [row for _, part in got for row in range(*part)]
        assert covered == list(range(*bands[rank].grow(n, rows)))
        for peer, part in [*route.above, *route.below]:
            assert (rank, part) in routes[peer].sends


def test_parallel_dims():
    dims = ParallelDims(8, 4)
    assert dims.data == 2
    assert [dims.data_rank(r) for r in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert [dims.spatial_rank(r) for r in (0, 3, 4, 7)] == [0, 3, 0, 3]
    for world, spatial, words in (
        (6, 4, r'4 ranks are to share an image, but the job has 6'),
        (2, 4, r'4 ranks are to share an image, but the job has 2'),
        (0, 1, 'world_size=0'),
        (4, 0, 'spatial=0'),
    ):
        with pytest.raises(ValueError, match=words):
            ParallelDims(world, spatial)
