# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# The backbone of infvit-4x128_neumann_tiny-imagenet-50.py, to see what its
# weights are worth; about 25 minutes on a CPU core.
_base_ = './infvit-tiny_neumann_camvid-480x360.py'

crop_size = (192, 192)
model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(
        embed_dims=128,
        num_layers=4,
        num_heads=4,
        img_size=crop_size,
        patch_size=8,
        out_indices=(1, 3),
        drop_path_rate=0.0,
        ffn='mlp',
    ),
    decode_head=dict(
        in_channels=[128, 128],
        in_index=[0, 1],
        num_upsamples=1,
    ),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(
        type='RandomResize',
        scale=(480, 360),
        ratio_range=(0.75, 1.5),
        keep_ratio=True,
    ),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(pipeline=train_pipeline),
)
