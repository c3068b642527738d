# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One of two processes that train with hooks; see test_zero_hooks.py.

``python zero_hooks_process.py ROOT`` trains the toy by each case of
``cases.json`` there and leaves what each rank found in ``NAME_RANK.json``.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import init_default_scope
from mmengine.runner import FlexibleRunner, find_latest_checkpoint
from mmseg.registry import HOOKS

import infsa_seg  # noqa: F401
from tests.engine.toy import Samples, Toy, validation


@HOOKS.register_module()
class Follow(Hook):
    """Notes weights and losses after each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.steps = []

    def after_train_iter(self, runner, batch_idx, data_batch, outputs):
        weight = runner.model.module.weight
        value = None if hasattr(weight, 'ds_id') else weight.tolist()
        self.steps.append([float(outputs['loss']), value])


def build(work_dir, case):
    hooks = case.get('hooks', {})
    scores = case.get('scores')
    return FlexibleRunner(
        model=Toy(**case.get('model', {})),
        work_dir=str(work_dir),
        strategy={'type': 'ZeroStrategy', **case['strategy']},
        train_dataloader={
            'dataset': Samples(case['pairs']),
            'sampler': {'type': 'DefaultSampler', 'shuffle': False},
            'batch_size': 1,
            'num_workers': 0,
        },
        optim_wrapper={'optimizer': {'type': 'AdamW', 'lr': 0.1}},
        train_cfg={
            'type': 'IterBasedTrainLoop',
            'max_iters': len(case['pairs']) // 2,
            'val_interval': 1,
        },
        default_hooks={
            'logger': {'type': 'LoggerHook', 'interval': 1},
            **hooks,
        },
        custom_hooks=[{'type': 'Follow'}, *case.get('custom_hooks', [])],
        default_scope='mmseg',
        experiment_name=f'{work_dir.name}_{case["name"]}',
        launcher='pytorch',
        log_processor={'by_epoch': False},
        log_level='ERROR',
        cfg=Config({}),
        env_cfg={},
        **(validation(scores) if scores else {}),
    )


def run_case(root, case):
    work_dir = root / case.get('work_dir', case['name'])
    runner = build(work_dir, case)
    if case.get('resume'):
        runner._resume = True
        runner._load_from = find_latest_checkpoint(str(work_dir))
    result = {}
    try:
        runner.train()
    except ValueError as error:
        result['error'] = f'{type(error).__name__}: {error}'
    (follow,) = (h for h in runner.hooks if isinstance(h, Follow))
    result['steps'] = follow.steps
    weight = runner.model.module.weight
    if not hasattr(weight, 'ds_id'):
        result['weight'] = weight.tolist()
    result['scalars'] = {
        name: float(buffer.current())
        for name, buffer in runner.message_hub.log_scalars.items()
    }
    result['iter'] = runner.iter
    for hook in runner.hooks:
        if hasattr(hook, 'ema_model'):
            result['average'] = hook.ema_model.module.weight.tolist()
    return result


def main():
    root = Path(sys.argv[1])
    cases = json.loads((root / 'cases.json').read_text())
    init_default_scope('mmseg')
    for case in cases:
        try:
            result = run_case(root, case)
        except Exception as error:
            result = {
                'failure': f'{type(error).__name__}: {error}',
                'traceback': traceback.format_exc(),
            }
        path = root / f'{case["name"]}_{get_rank()}.json'
        path.write_text(json.dumps(result))
    if get_rank() == 0:
        torch.save({}, root / 'results.pt')
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    main()
