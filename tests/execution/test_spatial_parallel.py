# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A group of ranks, a band on each, computes what one process computes."""

import pytest

from . import spatial_ranks as ranks
from .networks import VARIANTS

CASES = {
    f'{attention}-{ffn}': (ranks.equals_one_process, (attention, ffn))
    for attention in VARIANTS
    for ffn in ('mlp', 'dwconv')
}
CASES |= {
    f'{attention}-masked': (
        ranks.equals_one_process,
        (attention, 'dwconv', 1, (53, 37), True),
    )
    for attention in VARIANTS
}
CASES |= {
    f'{attention}-recomputed': (
        ranks.equals_one_process,
        (attention, 'dwconv', 2, (53, 37), True, True),
    )
    for attention in VARIANTS
}
# Bands of one row and a halo of two: some rows come from further ranks.
CASES |= {
    f'low-bands-{num_upsamples}': (
        ranks.equals_one_process,
        ('linear', 'dwconv', num_upsamples, (30, 17), False, True),
    )
    for num_upsamples in (0, 3)
}


@pytest.fixture(scope='module', params=[2, 3])
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('ranks')
    return ranks.run_ranks(CASES, request.param, folder)


@pytest.mark.parametrize('case', CASES)
def test_ranks_equal_one_process(outcomes, case):
    assert case in outcomes, 'an earlier case failed'
    assert not any(outcomes[case]), next(filter(None, outcomes[case]))
