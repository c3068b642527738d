# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# dataset settings
# 50 classes of ImageNet at 64 x 64: 500 pictures of each to train with, 50 to
# test with.
_base_ = './imagenet_1k.py'

data_root = 'data/tiny-imagenet-50'
train_pipeline = [
    dict(type='LoadPicture'),
    dict(type='RandomResizedCrop', scale=64, crop_ratio_range=(0.35, 1.0)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackClsInputs'),
]
test_pipeline = [
    dict(type='LoadPicture'),
    dict(type='PackClsInputs'),
]
train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    sampler=dict(_delete_=True, type='DefaultSampler', shuffle=True),
    dataset=dict(data_root=data_root, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=1,
    dataset=dict(data_root=data_root, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
