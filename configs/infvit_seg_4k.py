# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Crops of 4096 x 4096 (65,536 tokens). The scenes are drawn by window, so the
# config trains without any data at hand; inherit it and put your own in.
_base_ = [
    './_base_/models/infvit_band-seg.py',
    './_base_/datasets/synthetic_scenes_4k.py',
    './_base_/default_runtime.py',
    './_base_/schedules/schedule_4k.py',
]

model = dict(
    data_preprocessor=dict(size=(4096, 4096)),
    backbone=dict(
        arch='small',
        # The grid of positions is learnt at 64 x 64 and resampled.
        img_size=1024,
        out_indices=(3, 7, 11),
        with_cp=True,
    ),
    decode_head=dict(in_channels=[384, 384, 384], num_classes=8),
)
