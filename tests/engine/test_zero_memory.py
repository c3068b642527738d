# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The foreseen shares of ZeRO against what DeepSpeed holds on two ranks."""

import json

import pytest

from infsa_seg.execution import zero_shares

pytest.importorskip('deepspeed')

from . import zero_memory
from .processes import run_tool
from .zero_memory import BUCKET, CASES, WIDTH

WEIGHTS = 8 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp('memory')
    run_tool(2, zero_memory.__file__, str(root))
    found = json.loads((root / 'memory.json').read_text())
    return {(one['stage'], one['half']): one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize(('stage', 'half'), CASES)
def test_shares_are_those_of_deepspeed(measured, stage, half):
    shares = zero_shares(WEIGHTS, 0, 2, stage, half, BUCKET)
    found = measured[stage, half]
    assert shares.held == pytest.approx(found['held'], rel=0.01)
    foreseen = max(shares.backward, shares.update)
    assert foreseen == pytest.approx(found['peak'], rel=0.15)
