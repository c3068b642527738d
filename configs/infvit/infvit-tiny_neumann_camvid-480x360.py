# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
_base_ = [
    '../_base_/models/infvit_band-seg.py',
    '../_base_/datasets/camvid.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_camvid.py',
]

model = dict(
    data_preprocessor=dict(size=(360, 480)),
    backbone=dict(img_size=(360, 480)),
    decode_head=dict(num_classes=11),
)
train_dataloader = dict(batch_size=4)
