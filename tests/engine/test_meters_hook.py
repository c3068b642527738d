# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import json
import resource
from types import SimpleNamespace

import pytest
import torch
from mmengine.logging import MessageHub
from torch import nn

from infsa_seg.engine import MetersHook
from infsa_seg.execution import SpatialParallel
from infsa_seg.execution.plan import resident_bytes

from .toy import Samples, Toy, build_runner


class Backbone(nn.Module):
    patch_size = 16


class PictureToy(Toy):
    """The toy, for images of which only the first two pixels matter."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone()

    def forward(self, inputs, data_samples=None, mode='loss'):
        pairs = [image.flatten()[:2] for image in inputs]
        return super().forward(pairs, data_samples, mode)


@pytest.fixture
def parallel():
    """The group of one rank."""
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield SpatialParallel()
    torch.distributed.destroy_process_group()


def fake_runner(name, model):
    hub = MessageHub.get_instance(name)
    return SimpleNamespace(
        model=model, message_hub=hub, iter=0, hooks=[], logger=None
    )


def step(hook, runner, batch, seconds=0.5, traffic=lambda: None):
    hook.before_train_iter(runner, runner.iter, batch)
    traffic()
    runner.message_hub.update_scalar('train/time', seconds)
    hook.after_train_iter(runner, runner.iter, batch, {})
    runner.iter += 1


def logged(runner, name):
    return runner.message_hub.get_scalar(f'train/{name}').current()


def test_tokens_of_all_images_over_the_time_since_the_last_line():
    model = nn.Module()
    model.backbone = Backbone()
    runner = fake_runner('meters_tokens', model)
    hook = MetersHook(interval=2)
    hook.before_train(runner)
    # 2 x 3 tokens, then 2 x 1, padded to whole ones.
    batch = {'inputs': [torch.zeros(3, 32, 48), torch.zeros(3, 17, 16)]}
    step(hook, runner, batch, 0.5)
    assert 'train/tokens_per_s' not in runner.message_hub.log_scalars
    step(hook, runner, {'inputs': torch.zeros(2, 3, 32, 32)}, 1.5)
    assert logged(runner, 'tokens_per_s') == (6 + 2 + 8) / 2.0
    step(hook, runner, batch, 1.0)
    step(hook, runner, batch, 1.0)
    assert logged(runner, 'tokens_per_s') == 8


def test_peak_memory_of_the_process():
    runner = fake_runner('meters_memory', nn.Module())
    hook = MetersHook(interval=1)
    step(hook, runner, {'inputs': []})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # That may be of who started this process.
    assert 100 < logged(runner, 'memory') <= peak + 2
    now = resident_bytes() / 2**20
    block = torch.ones(2**27)  # 512 MiB
    step(hook, runner, {'inputs': []})
    assert logged(runner, 'memory') >= now + 500
    assert block.sum() == 2**27
    # A model without patches has no tokens to count.
    assert 'train/tokens_per_s' not in runner.message_hub.log_scalars
    assert 'train/merge_bytes' not in runner.message_hub.log_scalars


def test_bytes_of_one_step(parallel):
    """Not those of validation, nor of the steps between two lines."""
    model = nn.Module()
    model.spatial_parallel = parallel
    runner = fake_runner('meters_bytes', model)
    hook = MetersHook(interval=2)
    batch = {'inputs': []}
    traffic = parallel.traffic
    traffic.add_merge(torch.zeros(1000))
    step(hook, runner, batch, traffic=lambda: traffic.add_merge(torch.ones(5)))
    assert 'train/merge_bytes' not in runner.message_hub.log_scalars

    def send():
        traffic.add_merge(torch.zeros(10))
        traffic.halos.add(torch.zeros(3, dtype=torch.float64))

    step(hook, runner, batch, traffic=send)
    assert logged(runner, 'merge_bytes') == 40
    assert logged(runner, 'halo_bytes') == 24


def test_they_are_in_the_log_as_often_as_it_is_written(tmp_path):
    data = Samples([(1.0, 1.0)] * 4)
    data.pairs = [torch.ones(3, 16, 40)] * 4
    build_runner(
        tmp_path,
        data.pairs,
        model=PictureToy(),
        train_dataloader={
            'dataset': data,
            'sampler': {'type': 'DefaultSampler', 'shuffle': False},
            'batch_size': 1,
            'num_workers': 0,
        },
        default_hooks={
            'logger': {'type': 'LoggerHook', 'interval': 2},
            'checkpoint': None,
        },
        custom_hooks=[{'type': 'MetersHook'}],
    ).train()
    (log,) = tmp_path.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line['step'] for line in lines] == [2, 4]
    for line in lines:
        assert line['memory'] > 50
        seconds = 3 / line['tokens_per_s']
        assert 0 < seconds < 60
