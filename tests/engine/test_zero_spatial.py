# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Processes that share images under ZeRO against one plain process."""

import itertools
import json

import numpy as np
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope

pytest.importorskip('deepspeed')

from infsa_seg.apis import train
from infsa_seg.engine import ZeroStrategy, leave_group
from infsa_seg.execution import ParallelDims

from . import zero_spatial_process
from .processes import REPO, run_cases, run_tool
from .zero_process import OPTIMIZER, plain_optimizer
from .zero_spatial_process import STEPS, as_batch, build

CLIP = {'clip_grad': {'max_norm': 0.02}}
LINEAR = {'variant': 'linear'}
LANDMARK = {'variant': 'neumann'}
FEATURES = {'variant': 'neumann', 'graph': 'crelu', 'hops': 'inf'}


def case(stage, **model):
    return {
        'name': ' '.join([f'stage {stage}', *map(str, model.values())]),
        'strategy': {'stage': stage},
        'model': model,
    }


# One list for each number of processes, and how many share an image.
CASES = {
    (2, 2): [
        *(
            case(stage, ffn=ffn, **attn)
            for stage, ffn, attn in itertools.product(
                range(4), ('mlp', 'dwconv'), (LINEAR, LANDMARK)
            )
        ),
        case(2, **FEATURES),
        case(3, **LINEAR, with_cp=True, drop_path_rate=0.5) | {'save': True},
        case(2, **LANDMARK, drop_path_rate=0.3) | {'save': True},
        *(
            case(stage, **LANDMARK)
            | {'name': f'clip {stage}', 'optim_wrapper': CLIP}
            for stage in range(4)
        ),
    ],
    (3, 3): [
        *(
            case(stage, ffn=ffn, **attn)
            for stage, (ffn, attn) in enumerate(
                itertools.product(('mlp', 'dwconv'), (LINEAR, LANDMARK))
            )
        ),
        case(2, ffn='mlp', **FEATURES),
    ],
    (4, 2): [case(2, **LANDMARK), case(3, **LINEAR, with_cp=True)],
}
KEYS = [(key, c['name']) for key, cases in CASES.items() for c in cases]
SAVED = [
    (key, c['name'])
    for key, cases in CASES.items()
    for c in cases
    if c.get('save')
]


@pytest.fixture(scope='session')
def results(tmp_path_factory):
    """What groups of processes measured."""
    init_default_scope('mmseg')
    return {
        (processes, size): run_cases(
            zero_spatial_process,
            tmp_path_factory.mktemp(f'spatial-{processes}-{size}'),
            cases,
            processes,
            str(size),
        )
        for (processes, size), cases in CASES.items()
    }


def plain(case):
    """The same training in this process, by mmengine alone."""
    model, batches = build(**case['model'])
    wrapper, scheduler = plain_optimizer(model, case.get('optim_wrapper', {}))
    model.train()
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        log = model.train_step(as_batch(*batch), wrapper)
        scheduler.step()
        losses.append(log['loss'].item())
    return losses, model.state_dict()


def measured(results, key, name):
    result = results[key][name]
    assert 'error' not in result, result.get('traceback')
    return result


def assert_plain(result, case):
    """The losses of five steps, and the weights after them."""
    assert 'error' not in result, result.get('traceback')
    losses, weights = plain(case)
    assert len(losses) == STEPS
    assert np.allclose(result['losses'], losses, rtol=0, atol=1e-5)
    assert result['weights'].keys() == weights.keys()
    for parameter, value in weights.items():
        assert torch.allclose(
            result['weights'][parameter], value, rtol=0, atol=1e-5
        ), parameter


@pytest.mark.parametrize(('key', 'name'), KEYS)
def test_equals_one_plain_process(results, key, name):
    (wanted,) = [c for c in CASES[key] if c['name'] == name]
    assert_plain(results[key][name], wanted)


@pytest.mark.parametrize(('key', 'name'), KEYS)
def test_all_processes_share_what_is_divided(results, key, name):
    assert measured(results, key, name)['divided'] == key[0]


@pytest.mark.parametrize(('key', 'name'), SAVED)
def test_goes_on_as_if_it_had_not_stopped(results, key, name):
    result = measured(results, key, name)
    assert result['resumed'] == result['losses'][3:]
    for parameter, value in result['weights'].items():
        assert torch.equal(result['resumed_weights'][parameter], value)


def test_the_settings_make_a_difference(results):
    """Or the comparisons above would hold without them."""
    losses = [tuple(r['losses']) for r in results[2, 2].values()]
    # Stages are all alike; clipping is too, until weights have moved.
    assert len({np.round(loss, 4).tobytes() for loss in losses}) >= 7


def losses_of_4k(work_dir, num_processes, *options):
    """Train on small crops of the 4096 x 4096 config; the losses."""
    run_tool(
        num_processes,
        'tools/train.py',
        'configs/infvit_seg_4k.py',
        *('--launcher', 'pytorch', '--work-dir', str(work_dir), *options),
        '--cfg-options',
        'model.data_preprocessor.size=(128,112)',
        'train_dataloader.dataset.size=(120,112)',
        'train_dataloader.dataset.patch=4',
        'train_dataloader.num_workers=1',
        'train_cfg.max_iters=3',
        'val_dataloader=None',
        'val_evaluator=None',
        'val_cfg=None',
        'strategy.bf16.enabled=False',
        'default_hooks.logger.interval=1',
        'optim_wrapper.optimizer.lr=1e-2',
        'randomness.seed=1',
        'model.backbone.embed_dims=48',
        'model.backbone.num_heads=2',
        'model.decode_head.in_channels=(48,48,48)',
    )
    (path,) = work_dir.rglob('scalars.json')
    return [json.loads(line)['loss'] for line in path.open()]


def test_from_the_command_line(tmp_path):
    """Reading by rows, seeds and dropped paths included."""
    one = losses_of_4k(tmp_path / 'one', 1)
    two = losses_of_4k(tmp_path / 'two', 2, '--spatial-parallel-size', '2')
    assert len(one) == 3
    assert np.allclose(one, two, rtol=0, atol=1e-5)
    assert (tmp_path / 'two' / 'iter_3.pth').is_dir()


def test_a_size_that_does_not_divide(tmp_path):
    with pytest.raises(
        ValueError, match='2 ranks are to share an image, but the job has 1'
    ):
        train(
            REPO / 'configs' / 'infvit_seg_4k.py',
            work_dir=str(tmp_path),
            spatial_parallel_size=2,
        )


def test_other_loops(tmp_path):
    with pytest.raises(ValueError, match='go with train_cfg EpochBasedTrain'):
        train(
            REPO / 'configs' / 'infvit_seg_4k.py',
            work_dir=str(tmp_path),
            spatial_parallel_size=2,
            cfg_options={'train_cfg.type': 'EpochBasedTrainLoop'},
        )


def test_other_models(tmp_path):
    """One process of a group of two is enough to see it."""
    strategy = ZeroStrategy(work_dir=str(tmp_path))
    strategy.dims = ParallelDims(2, 2)
    with pytest.raises(ValueError, match='a Linear cannot train on bands'):
        strategy._share_images(torch.nn.Linear(1, 1))
    leave_group()


def test_a_batch_is_counted_once_for_a_group(tmp_path):
    strategy = ZeroStrategy(
        work_dir=str(tmp_path),
        auto_scale_lr=dict(enable=True, base_batch_size=16),
    )
    strategy.dims = ParallelDims(4, 4)
    strategy._world_size = 4
    strategy.dispatch_kwargs['train_micro_batch_size_per_gpu'] = 4
    model = torch.nn.Linear(1, 1)
    wrapper = build_optim_wrapper(model, {'optimizer': OPTIMIZER})
    strategy.optim_wrapper = wrapper
    strategy._scale_lr()
    assert wrapper.param_groups[0]['lr'] == OPTIMIZER['lr'] * 4 / 16
    leave_group()
