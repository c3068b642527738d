# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# A few minutes on two CPU cores: scenes of 128 x 128 that are drawn on the
# fly, in which a panel in one corner decides how half of the picture is
# labelled.
_base_ = [
    './_base_/models/infvit_band-seg.py',
    './_base_/datasets/synthetic_scenes.py',
    './_base_/default_runtime.py',
    './_base_/schedules/schedule_demo.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        embed_dims=96,
        num_layers=4,
        num_heads=3,
        img_size=128,
        patch_size=8,
        out_indices=(1, 3),
        drop_path_rate=0.0,
    ),
    decode_head=dict(
        in_channels=[96, 96],
        in_index=[0, 1],
        channels=48,
        num_classes=8,
        num_upsamples=1,
        dropout_ratio=0.0,
    ),
)

randomness = dict(seed=0)
