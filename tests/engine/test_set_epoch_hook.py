# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from typing import ClassVar

import pytest
import torch
from mmengine.dataset import BaseDataset, ConcatDataset, RepeatDataset

from infsa_seg.engine import SetEpochHook
from tests.apis.conftest import REPO

from .toy import build_runner


class Drawn(BaseDataset):
    """Remembers which epochs it was told of."""

    epochs: ClassVar[list[int]] = []

    def load_data_list(self):
        return [{'inputs': torch.ones(2)}]

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.fixture(autouse=True)
def nothing_told():
    # Runners copy data sets.
    Drawn.epochs.clear()


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


@pytest.mark.parametrize(
    ('dataset', 'count'),
    [
        (Drawn(), 1),
        (RepeatDataset(Drawn(), 2), 1),
        (ConcatDataset([Drawn(), Drawn()]), 2),
    ],
)
def test_every_epoch_is_told(tmp_path, dataset, count):
    loop = {'type': 'EpochBasedTrainLoop', 'max_epochs': 3}
    run(tmp_path, dataset, loop)
    assert Drawn.epochs == sorted([0, 1, 2] * count)


def test_a_run_of_iterations_has_none(tmp_path):
    loop = {'type': 'IterBasedTrainLoop', 'max_iters': 3}
    run(tmp_path, Drawn(), loop)
    assert Drawn.epochs == []


def test_our_configs_have_it():
    text = (REPO / 'configs/_base_/schedules/adamw.py').read_text()
    assert f"type='{SetEpochHook.__name__}'" in text
