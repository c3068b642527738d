# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What each process of a spatial group does; started by test_zero_spatial.py.

``python zero_spatial_process.py FOLDER P`` reads the cases from
``cases.json`` there and leaves what rank 0 measured in ``results.pt``. Images
are shared by P processes each.
"""

import copy
import sys
from pathlib import Path

import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.runner import set_random_seed
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

import infsa_seg  # noqa: F401
from infsa_seg.datasets import CropShare

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.zero_process import OPTIMIZER, prepare, run_all

# Bands of unequal height, the last of them with a patch that is cut short.
CROP, PATCH, IMAGES, STEPS = (52, 36), 8, 2, 5


def build(ffn='dwconv', drop_path_rate=0.0, with_cp=False, **attn_cfg):
    """The same segmentor and the same batches every time."""
    set_random_seed(0)
    model = MODELS.build(
        dict(
            type='BandEncoderDecoder',
            data_preprocessor=dict(
                type='SegDataPreProcessor', size=CROP, seg_pad_val=255
            ),
            backbone=dict(
                type='InfViT',
                arch=dict(embed_dims=16, num_layers=2, num_heads=2),
                img_size=32,
                patch_size=PATCH,
                out_indices=(0, 1),
                ffn=ffn,
                drop_path_rate=drop_path_rate,
                with_cp=with_cp,
                attn_cfg=attn_cfg,
            ),
            decode_head=dict(
                type='BandSegHead',
                in_channels=[16, 16],
                in_index=[0, 1],
                channels=8,
                num_classes=3,
                num_upsamples=1,
                dropout_ratio=0.0,
                loss_decode=dict(type='BandCrossEntropyLoss'),
            ),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
        )
    )
    pixels = torch.randn(STEPS, IMAGES, 3, CROP[0] - 3, CROP[1])
    labels = torch.randint(3, (STEPS, IMAGES, 1, CROP[0] - 3, CROP[1]))
    # As many in each image: means of images are the mean of all.
    labels[..., :5, 7:] = 255
    return model, list(zip(pixels, labels, strict=True))


def as_batch(pixels, labels):
    """What a dataloader gives for some images."""
    samples = []
    for label in labels:
        sample = SegDataSample()
        sample.gt_sem_seg = PixelData(data=label)
        samples.append(sample)
    return {'inputs': list(pixels), 'data_samples': samples}


def share(batch, dims):
    """The images of this group, and the rows of this process."""
    part = IMAGES // dims.data
    first = dims.data_rank(get_rank()) * part
    rows = CropShare(
        dims.spatial_rank(get_rank()), dims.spatial, CROP, PATCH
    ).within(CROP[0] - 3)
    images = slice(first, first + part)
    return as_batch(*(x[images, :, slice(*rows)] for x in batch))


def step(engine, batch, number):
    """One iteration; its loss over all groups."""
    torch.manual_seed(number)
    log = engine.model.train_step(
        share(batch, engine.dims), engine.optim_wrapper
    )
    for scheduler in engine.param_schedulers:
        scheduler.step()
    loss = log['loss'].detach().clone()
    torch.distributed.all_reduce(loss)
    return loss.item() / get_world_size()


def start(root, model, case, size):
    strategy = {**case['strategy'], 'spatial_parallel_size': size}
    zero = strategy.setdefault('zero_optimization', {})
    # By default every parameter here is too small to be divided.
    zero['stage3_param_persistence_threshold'] = 0
    wrapper = {'optimizer': OPTIMIZER, **case.get('optim_wrapper', {})}
    batch_size = IMAGES * size // get_world_size()
    engine = prepare(root, model, strategy, copy.deepcopy(wrapper), batch_size)
    engine.model.train()
    return engine


def run_case(root, case, size):
    """Train; save and go on in a new strategy where asked to."""
    model, batches = build(**case['model'])
    engine = start(root, model, case, size)
    saved = root / f'{case["name"]}.pth'
    losses = []
    for number, batch in enumerate(batches):
        if number == 3 and case.get('save'):
            engine.save_checkpoint(str(saved), extra_ckpt={'meta': {}})
        losses.append(step(engine, batch, number))
    result = {
        'losses': losses,
        'weights': engine._all_weights(),
        'divided': engine.model.dp_world_size,
    }
    if case.get('save'):
        model, _ = build(**case['model'])
        engine = start(root, model, case, size)
        engine.resume(str(saved))
        result['resumed'] = [
            step(engine, batches[number], number) for number in (3, 4)
        ]
        result['resumed_weights'] = engine._all_weights()
    return result


if __name__ == '__main__':
    run_all(run_case, Path(sys.argv[1]), int(sys.argv[2]))
