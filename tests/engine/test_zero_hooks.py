# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Hooks under ZeRO on two processes.

All cases run in one pair of processes, one after the other.
"""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip('deepspeed')

from infsa_seg.engine import ZeroFolder

from . import zero_hooks_process
from .processes import run_cases

GOOD = (1.0, 1.0)
# Its loss is no number.
BAD = (math.nan, 1.0)
# Its loss is 1, and its gradient infinite.
STEEP = (1.0, 0.0)
WATCH = [{'type': 'NonFiniteHook'}]


def checkpoint(**kwargs):
    settings = {'by_epoch': False, 'interval': 1, 'max_keep_ckpts': 1}
    return {'checkpoint': {'type': 'SafeCheckpointHook', **settings, **kwargs}}


def bad_third(pair, rank):
    """Four iterations; ``pair`` is in the third, on that rank."""
    pairs = [GOOD] * 8
    pairs[4 + rank] = pair
    return pairs


def averaged(name, **case):
    return {
        'name': name,
        'pairs': [(1.0 + i / 8, 2.0) for i in range(12)],
        'strategy': {'stage': 2},
        'custom_hooks': [{'type': 'EMAHook', 'momentum': 0.1}],
        'hooks': checkpoint(max_keep_ckpts=3),
        **case,
    }


DIVIDED = {'stage3_param_persistence_threshold': 0}
BF16 = {'stage': 1, 'bf16': {'enabled': True}}
HALF = averaged(
    'average half',
    strategy=BF16,
    scores=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    hooks=checkpoint(save_best='mIoU'),
)
CASES = [
    {
        'name': 'loss',
        'strategy': {'stage': 2},
        'pairs': bad_third(BAD, 1),
        'custom_hooks': WATCH,
        'hooks': checkpoint(),
    },
    *(
        {
            'name': f'gradient {name}',
            'strategy': strategy,
            'pairs': bad_third(STEEP, 0),
            'custom_hooks': WATCH,
            'hooks': checkpoint(),
        }
        for name, strategy in {
            '0': {'stage': 0},
            '1': {'stage': 1},
            '2': {'stage': 2},
            '3': {'stage': 3},
            'bf16': BF16,
        }.items()
    ),
    {
        'name': 'best',
        'strategy': {'stage': 2},
        'pairs': [GOOD] * 8,
        'scores': [1.0, 0.5, 1.5, 2.0],
        'hooks': checkpoint(save_best='mIoU'),
    },
    averaged('average'),
    averaged('average begun', pairs=averaged('')['pairs'][:6]),
    averaged('average resumed', work_dir='average begun', resume=True),
    HALF,
    averaged('average divided', strategy={'stage': 3}),
    *(
        {
            'name': f'discounts {stage}',
            'strategy': {'stage': stage, 'zero_optimization': DIVIDED},
            'model': {'discount': 0.25},
            'pairs': [GOOD] * 4,
            'custom_hooks': [{'type': 'DiscountsHook'}],
        }
        for stage in (2, 3)
    ),
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """What two processes left behind."""
    root = tmp_path_factory.mktemp('zero_hooks')
    run_cases(zero_hooks_process, root, CASES, 2)
    return root


def read(folder, name):
    """What each rank found."""
    results = [
        json.loads((folder / f'{name}_{rank}.json').read_text())
        for rank in range(2)
    ]
    for result in results:
        assert 'failure' not in result, result['traceback']
    return results


def test_all_ranks_stop_and_name_the_one_that_has_it(folder):
    results = read(folder, 'loss')
    last = folder / 'loss' / 'iter_2.pth'
    assert results[0]['error'] == results[1]['error']
    assert results[0]['error'] == (
        'NonFiniteError: iteration 3: a loss is not finite: loss=nan, '
        'loss_fit=nan with the batch of rank 1: image5.tif (32x64 at row '
        f'5, column 16); the last good checkpoint is {last}'
    )
    assert sorted(p.name for p in last.parent.glob('*.pth')) == ['iter_2.pth']


@pytest.mark.parametrize('name', ['0', '1', '2', '3', 'bf16'])
def test_a_gradient_is_everybodys(folder, name):
    results = read(folder, f'gradient {name}')
    last = folder / f'gradient {name}' / 'iter_2.pth'
    assert results[0]['error'] == results[1]['error']
    assert results[0]['error'] == (
        'NonFiniteError: iteration 3: the gradient is not finite, though '
        'the losses are: with the batch of rank 0: image4.tif (32x64 at '
        'row 4, column 16); with the batch of rank 1: image5.tif (32x64 at '
        f'row 5, column 16); the last good checkpoint is {last}'
    )


@pytest.mark.parametrize('name', ['loss', 'gradient 0', 'gradient 2'])
def test_weights_are_those_before_the_bad_step(folder, name):
    for result in read(folder, name):
        assert len(result['steps']) == 2
        assert result['weight'] == result['steps'][-1][1]


def test_folders_are_pruned(folder):
    read(folder, 'best')
    left = sorted(path.name for path in (folder / 'best').glob('*.pth'))
    assert left == ['best_mIoU_iter_4.pth', 'iter_4.pth']
    assert not list((folder / 'best').glob('.*'))
    last = (folder / 'best' / 'last_checkpoint').read_text()
    assert last == str(folder / 'best' / 'iter_4.pth')


def test_what_is_saved_after_validation_says_its_iteration(folder):
    """Upstream's says one more, and one is left out on going on."""
    saved = ZeroFolder(folder / 'best' / 'iter_4.pth')
    assert saved.meta['iter'] == 4


def test_the_average_is_that_of_the_weights(folder):
    for result in read(folder, 'average'):
        weights = np.array([weight for _, weight in result['steps']])
        average = weights[0]
        for weight in weights[1:]:
            average = 0.9 * average + 0.1 * weight
        assert np.allclose(result['average'], average, rtol=0, atol=1e-6)
        assert not np.allclose(average, weights[-1], rtol=0, atol=1e-3)


def test_the_average_goes_on(folder):
    whole = read(folder, 'average')
    resumed = read(folder, 'average resumed')
    for one, other in zip(whole, resumed, strict=True):
        assert other['steps'] == one['steps'][3:]
        assert other['average'] == one['average']


def test_half_precision_is_averaged_in_float32(folder):
    """And validation, which uses the average, leaves it as it was."""
    for result in read(folder, 'average half'):
        weights = np.array([weight for _, weight in result['steps']])
        average = weights[0]
        for weight in weights[1:]:
            average = 0.9 * average + 0.1 * weight
        assert np.allclose(result['average'], average, rtol=0, atol=1e-6)
        rounded = torch.tensor(average).bfloat16().tolist()
        assert not np.allclose(rounded, average, rtol=0, atol=1e-4)


def test_the_best_file_is_the_average(folder):
    result = read(folder, 'average half')[0]
    path = folder / 'average half' / 'best_mIoU_iter_6.pth'
    content = torch.load(path, weights_only=True)
    weight = content['state_dict']['weight']
    assert weight.tolist() == result['average']
    assert 'ema_state_dict' not in content['message_hub']['runtime_info']


def test_an_average_of_divided_weights_is_refused(folder):
    for result in read(folder, 'average divided'):
        assert result['error'].startswith('ValueError: EMAHook: ZeRO stage 3')
        assert '\n' not in result['error']


@pytest.mark.parametrize('stage', [2, 3])
def test_discounts_of_divided_layers(folder, stage):
    for result in read(folder, f'discounts {stage}'):
        scalars = result['scalars']
        for name in ('mean', 'min', 'max'):
            value = scalars[f'train/gamma/00_{name}']
            assert value == pytest.approx(0.25, abs=1e-3)
