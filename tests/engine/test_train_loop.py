# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A training that is stopped and goes on does what it would have done."""

import json

import pytest
from mmengine.config import ConfigDict

from infsa_seg.apis import train
from infsa_seg.datasets import SeededDataset
from infsa_seg.engine.train_loop import _find_share
from infsa_seg.execution import ParallelDims
from tests.apis.conftest import project

__all__ = ['project']

# Flips, dropped paths and dropped channels.
RANDOM = {
    'model.backbone.drop_path_rate': 0.5,
    'model.decode_head.dropout_ratio': 0.3,
    'train_dataloader.dataset.pipeline': [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PhotoMetricDistortion'),
        dict(type='PackSegInputs'),
    ],
    'default_hooks.logger.interval': 1,
    'default_hooks.checkpoint.interval': 3,
    'default_hooks.checkpoint.save_best': None,
    'train_cfg.val_interval': 100,
    'randomness.seed': None,
}


def run(project, work_dir, max_iters, **kwargs):
    options = {**RANDOM, 'train_cfg.max_iters': max_iters}
    options |= kwargs.pop('cfg_options', {})
    train(
        project / 'tiny.py',
        work_dir=str(work_dir),
        cfg_options=options,
        **kwargs,
    )
    return curve(work_dir)


def curve(work_dir):
    """The loss of every iteration, the last of those that were run twice."""
    losses = {}
    for path in sorted(work_dir.rglob('scalars.json')):
        for line in path.read_text().splitlines():
            scalars = json.loads(line)
            if 'loss' in scalars:
                losses[scalars['step']] = scalars['loss']
    return losses


@pytest.fixture
def seen(monkeypatch):
    """The items that are made, in order."""
    made = []
    get = SeededDataset.__getitem__

    def count(self, index):
        made.append((int(index), index.seed))
        return get(self, index)

    monkeypatch.setattr(SeededDataset, '__getitem__', count)
    return made


def test_goes_on_exactly_and_reads_nothing_twice(project, tmp_path, seen):
    whole = run(project, tmp_path / 'whole', 6, cfg_options={})
    items = list(seen)
    assert len(items) == 12
    # The seed is drawn, and has to come from the checkpoint.
    seen.clear()
    work_dir = tmp_path / 'whole'
    (work_dir / 'iter_6.pth').unlink()
    run(project, work_dir, 6, resume=str(work_dir / 'iter_3.pth'))
    assert seen == items[6:]
    assert len(list(work_dir.rglob('scalars.json'))) == 2
    assert curve(work_dir) == whole
    assert len(whole) == 6


def test_another_training_is_another(project, tmp_path, seen):
    first = run(project, tmp_path / 'a', 2)
    second = run(project, tmp_path / 'b', 2)
    assert first != second
    assert seen[:4] != seen[4:]


def test_other_samplers(project, tmp_path):
    options = {'train_dataloader.sampler.type': 'DefaultSampler'}
    with pytest.raises(ValueError, match='sampler DefaultSampler: SeededTr'):
        run(project, tmp_path, 2, cfg_options=options)


def test_crops_of_no_size():
    model = ConfigDict(data_preprocessor=dict(), backbone=dict())
    with pytest.raises(ValueError, match='=2 cuts all crops alike: say model'):
        _find_share(model, ParallelDims(2, 2), 0)
    model.data_preprocessor.size = (20, 30)
    share = _find_share(model, ParallelDims(4, 2), 3)
    assert share == dict(rank=1, size=2, crop=(20, 30), patch_size=16)
