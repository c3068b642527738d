# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A training that takes no time, for tests of hooks."""

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from mmseg.registry import METRICS
from torch import nn

from infsa_seg.layers import InfSAAttention


class Toy(BaseModel):
    """Two weights; what is in the input decides what becomes of them.

    Args:
        discount (float, optional): Adds a layer that has learnt it.
    """

    def __init__(self, discount=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        if discount is not None:
            self.attn = InfSAAttention(
                4, 2, variant='linear', discount=discount
            )

    def forward(self, inputs, data_samples=None, mode='loss', **kwargs):
        x = torch.stack(inputs).to(self.weight.dtype)
        if mode != 'loss':
            return data_samples
        # At 0 the root is finite and its slope is not.
        return {
            'loss_fit': (x[:, 0] * self.weight[0]).square().mean(),
            'loss_root': (x[:, 1] * self.weight[1]).abs().sqrt().mean(),
            'acc_seg': torch.tensor(torch.nan),
        }


class Samples(torch.utils.data.Dataset):
    """Pairs of numbers, each with a name and a window."""

    def __init__(self, pairs):
        self.pairs = [torch.as_tensor(pair) for pair in pairs]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        meta = {
            'img_path': f'image{index}.tif',
            'window': (index, 16, 32, 64),
        }
        return {
            'inputs': self.pairs[index],
            'data_samples': BaseDataElement(metainfo=meta),
        }


@METRICS.register_module()
class ToyScore(BaseMetric):
    """Scores that a list gives, one for each validation."""

    def __init__(self, scores):
        super().__init__()
        self.scores = list(scores)

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        score = self.scores.pop(0)
        return {'mIoU': score, 'mAcc': -score}


def validation(scores):
    """Settings of a runner that validates after every step."""
    return {
        'val_dataloader': {
            'dataset': [{'inputs': torch.ones(2), 'data_samples': 0}] * 2,
            'sampler': {'type': 'DefaultSampler', 'shuffle': False},
            'batch_size': 1,
            'num_workers': 0,
        },
        'val_cfg': {'type': 'ValLoop'},
        'val_evaluator': {'type': 'ToyScore', 'scores': scores},
    }


def build_runner(work_dir, pairs, batch_size=1, **kwargs):
    """A runner over the pairs in their order, once.

    Args:
        work_dir (Path): Where it writes.
        pairs (list): What :class:`Samples` takes.
        batch_size (int): Pairs in an iteration.
        **kwargs: Of mmengine's runner, before what is here.
    """
    settings = {
        'model': Toy(),
        'train_dataloader': {
            'dataset': Samples(pairs),
            'sampler': {'type': 'DefaultSampler', 'shuffle': False},
            'batch_size': batch_size,
            'num_workers': 0,
        },
        'train_cfg': {
            'type': 'IterBasedTrainLoop',
            'max_iters': len(pairs) // batch_size,
        },
        'optim_wrapper': {'optimizer': {'type': 'AdamW', 'lr': 0.1}},
        'log_processor': {'by_epoch': False},
        'default_hooks': {
            'logger': {'type': 'LoggerHook', 'interval': 1},
            'checkpoint': None,
        },
        'experiment_name': work_dir.name,
        'default_scope': 'mmseg',
        'log_level': 'ERROR',
        **kwargs,
    }
    return Runner(work_dir=str(work_dir), **settings)
