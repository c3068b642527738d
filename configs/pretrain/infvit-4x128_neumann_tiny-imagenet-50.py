# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Small enough for two CPU cores, and large enough to tell attentions apart.
_base_ = [
    '../_base_/models/infvit_classifier.py',
    '../_base_/datasets/tiny_imagenet_50.py',
    '../_base_/pretrain_runtime.py',
    '../_base_/schedules/schedule_tiny-imagenet-50.py',
]

model = dict(
    data_preprocessor=dict(num_classes=50, batch_augments=[]),
    backbone=dict(
        embed_dims=128,
        num_layers=4,
        num_heads=4,
        img_size=64,
        patch_size=8,
        drop_path_rate=0.0,
        ffn='mlp',
    ),
    num_classes=50,
)
randomness = dict(seed=0)
