# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What one of two processes of ZeRO holds; started by test_zero_memory.py.

``python zero_memory.py FOLDER`` leaves in ``memory.json`` there the bytes
that rank 0 held between two steps, and the most in a step, of every case.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from mmengine.dist import get_rank
from mmengine.model import BaseModel
from mmengine.registry import init_default_scope
from torch import nn

import infsa_seg  # noqa: F401
from infsa_seg.execution.measure import Tracker
from tests.engine.zero_process import OPTIMIZER, prepare

WIDTH = 256
# In numbers; DeepSpeed's own of half a billion would hide all else.
BUCKET = 300_000
CASES = [(stage, half) for stage in range(4) for half in (False, True)]


class Net(BaseModel):
    """Weights, and next to no activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        )

    def forward(self, inputs, data_samples=None, mode='loss'):
        return {'loss': self.layers(inputs).square().mean()}


def storages():
    """Of all tensors that there are, by where they begin."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == 'cpu':
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage
    found.pop(0, None)
    return found


def measure(root, stage, half):
    gc.collect()
    before = set(storages())
    strategy = dict(
        stage=stage,
        bf16=dict(enabled=half),
        zero_optimization=dict(
            reduce_bucket_size=BUCKET, stage3_param_persistence_threshold=0
        ),
    )
    engine = prepare(root, Net(), strategy, dict(optimizer=OPTIMIZER))
    engine.model.train()

    def step():
        engine.model.train_step(
            {'inputs': torch.ones(1, WIDTH), 'data_samples': None},
            engine.optim_wrapper,
        )

    step()
    step()
    gc.collect()
    held = {k: v for k, v in storages().items() if k not in before}
    held_bytes = sum(storage.nbytes() for storage in held.values())
    # What is held is not counted again where it is written to.
    known = [
        torch.empty(0, dtype=torch.uint8).set_(storage)
        for storage in held.values()
    ]
    with Tracker(known) as tracker:
        step()
    return {'held': held_bytes, 'peak': held_bytes + tracker.peak}


def main():
    root = Path(sys.argv[1])
    init_default_scope('mmseg')
    found = [
        dict(stage=stage, half=half, **measure(root, stage, half))
        for stage, half in CASES
    ]
    if get_rank() == 0:
        (root / 'memory.json').write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    main()
