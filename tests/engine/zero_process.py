# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What one of two processes of ZeRO does; started by test_zero.py.

``python zero_process.py FOLDER`` reads the cases from ``cases.json`` there
and leaves what rank 0 measured in ``results.pt``.
"""

import copy
import json
import sys
import traceback
from pathlib import Path

import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope
from mmengine.runner import set_random_seed
from torch import nn

import infsa_seg  # noqa: F401
from infsa_seg.models.backbones import InfViT

BATCH = 4
# The usual eps lets gradients that are rounding alone move weights too.
OPTIMIZER = dict(type='AdamW', lr=1e-2, weight_decay=0.05, eps=1e-3)
SCHEDULE = dict(type='LinearLR', start_factor=0.5, by_epoch=False, end=5)


class Net(BaseModel):
    """A small InfViT with a buffer, and a frozen layer if asked for."""

    def __init__(
        self, frozen=False, with_cp=False, attn_cfg=None, batch_norm=True
    ):
        super().__init__()
        self.backbone = InfViT(
            arch=dict(embed_dims=16, num_layers=2, num_heads=2),
            img_size=32,
            patch_size=8,
            out_indices=(1,),
            with_cp=with_cp,
            attn_cfg=attn_cfg or dict(variant='linear'),
        )
        self.norm = nn.BatchNorm2d(16) if batch_norm else nn.GroupNorm(4, 16)
        self.head = nn.Conv2d(16, 3, 1)
        if frozen:
            for parameter in self.backbone.patch_embed.parameters():
                parameter.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()  # the same on one process as on two
        return self

    def forward(self, inputs, data_samples=None, mode='loss'):
        (x,) = self.backbone(inputs)
        logits = self.head(self.norm(x)).mean((2, 3))
        return {'loss': nn.functional.cross_entropy(logits, data_samples)}


def build(**kwargs):
    """The same network and the same batches every time."""
    set_random_seed(0)
    model = Net(**kwargs)
    if kwargs.get('batch_norm', True):
        model.norm.running_mean.normal_()
    images = torch.randn(8, BATCH, 3, 32, 32)
    labels = torch.randint(3, (8, BATCH))
    return model, list(zip(images, labels, strict=True))


def share(batch):
    """The part of a batch that belongs to this process."""
    part = BATCH // get_world_size()
    mine = slice(get_rank() * part, (get_rank() + 1) * part)
    return {'inputs': batch[0][mine], 'data_samples': batch[1][mine]}


def prepare(work_dir, model, strategy, optim_wrapper, batch_size=None):
    from infsa_seg.engine import ZeroStrategy

    strategy = ZeroStrategy(
        work_dir=str(work_dir),
        env_kwargs=dict(launcher='pytorch', randomness=dict(seed=0)),
        log_kwargs=dict(log_level='ERROR'),
        **strategy,
    )
    strategy.prepare(
        model,
        optim_wrapper=optim_wrapper,
        param_scheduler=[SCHEDULE],
        dispatch_kwargs=dict(
            max_iters=8,
            max_epochs=1,
            train_micro_batch_size_per_gpu=batch_size
            or BATCH // get_world_size(),
            init_weights_for_test_or_val=False,
        ),
    )
    return strategy


def step(strategy, batch):
    """One iteration; the loss over all processes."""
    log = strategy.model.train_step(share(batch), strategy.optim_wrapper)
    for scheduler in strategy.param_schedulers:
        scheduler.step()
    loss = log['loss'].detach().clone()
    torch.distributed.all_reduce(loss)
    return loss.item() / get_world_size()


def run_case(root, case):
    """Train; save, go on in a new strategy and convert where asked to."""
    model, batches = build(**case.get('model', {}))
    strategy = dict(case.get('strategy', {}))
    zero = strategy.setdefault('zero_optimization', {})
    if strategy['stage'] == 3:
        # By default every parameter here is too small to be divided.
        zero['stage3_param_persistence_threshold'] = 0
    wrapper = {'optimizer': OPTIMIZER, **case.get('optim_wrapper', {})}
    engine = prepare(root, model, strategy, copy.deepcopy(wrapper))
    engine.model.train()
    losses, saved = [], root / f'{case["name"]}.pth'
    for index, batch in enumerate(batches[: case.get('steps', 5)]):
        if index == 3 and case.get('save'):
            engine.save_checkpoint(
                str(saved), extra_ckpt={'meta': {'iter': 3, 'classes': 'ab'}}
            )
            part = root / f'{case["name"]}_weights.pth'
            engine.save_checkpoint(str(part), save_optimizer=False)
        losses.append(step(engine, batch))
    result = {
        'losses': losses,
        'weights': engine._all_weights(),
        'config': engine.config,
        'groups': [
            (group['lr'], group['weight_decay'])
            for group in engine.optim_wrapper.optimizer.param_groups
        ],
    }
    if case.get('save'):
        model, _ = build(**case.get('model', {}))
        engine = prepare(root, model, strategy, copy.deepcopy(wrapper))
        engine.model.train()
        meta = engine.resume(str(saved))['meta']
        result['resumed'] = [step(engine, batch) for batch in batches[3:5]]
        result['resumed_weights'] = engine._all_weights()
        result['resumed_iter'] = meta['iter']
    return result


def plain_optimizer(model, cfg):
    """What mmengine alone trains with: optimizer wrapper and schedule."""
    cfg = {'optimizer': OPTIMIZER, **cfg}
    wrapper = build_optim_wrapper(model, copy.deepcopy(cfg))
    schedule = {**SCHEDULE, 'optimizer': wrapper}
    return wrapper, PARAM_SCHEDULERS.build(schedule)


def run_all(run_case, root, *args):
    """Run the cases in ``root``; leave there what rank 0 measured."""
    init_default_scope('mmseg')
    results = {}
    for case in json.loads((root / 'cases.json').read_text()):
        try:
            results[case['name']] = run_case(root, case, *args)
        except Exception as error:
            results[case['name']] = {
                'error': f'{type(error).__name__}: {error}',
                'traceback': traceback.format_exc(),
            }
    if get_rank() == 0:
        torch.save(results, root / 'results.pt')
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    run_all(run_case, Path(sys.argv[1]))
