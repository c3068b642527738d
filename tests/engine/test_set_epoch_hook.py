# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmengine.dataset import BaseDataset, ConcatDataset, RepeatDataset

from infsa_seg.engine import SetEpochHook
from tests.apis.conftest import REPO

from .toy import build_runner


class Drawn(BaseDataset):
    """Remembers which epochs it was told of."""

    def load_data_list(self):
        return [{'inputs': torch.ones(2)}]

    def set_epoch(self, epoch):
        self.epochs = [*getattr(self, 'epochs', []), epoch]


def run(work_dir, dataset, loop):
    build_runner(
        work_dir,
        [],
        train_dataloader={
            'dataset': dataset,
            'sampler': {'type': 'DefaultSampler', 'shuffle': False},
            'batch_size': 1,
            'num_workers': 0,
        },
        train_cfg=loop,
        custom_hooks=[{'type': 'SetEpochHook'}],
    ).train()


def wrap(dataset, wrapper):
    if wrapper == 'repeat':
        return RepeatDataset(dataset, 2)
    if wrapper == 'concat':
        return RepeatDataset(ConcatDataset([Drawn(), dataset]), 1)
    return dataset


@pytest.mark.parametrize('wrapper', ['none', 'repeat', 'concat'])
def test_every_epoch_is_told(tmp_path, wrapper):
    drawn = Drawn()
    loop = {'type': 'EpochBasedTrainLoop', 'max_epochs': 3}
    run(tmp_path, wrap(drawn, wrapper), loop)
    assert drawn.epochs == [0, 1, 2]


def test_a_run_of_iterations_has_none(tmp_path):
    drawn = Drawn()
    loop = {'type': 'IterBasedTrainLoop', 'max_iters': 3}
    run(tmp_path, drawn, loop)
    assert not hasattr(drawn, 'epochs')


def test_our_configs_have_it():
    text = (REPO / 'configs/_base_/schedules/adamw.py').read_text()
    assert f"type='{SetEpochHook.__name__}'" in text
