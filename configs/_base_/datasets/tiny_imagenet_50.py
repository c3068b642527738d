# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# dataset settings
# 50 classes of ImageNet at 64 x 64: 500 pictures of each to train with, 50 to
# test with.
dataset_type = 'ImageNet'
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
    batch_size=128,
    num_workers=1,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='train'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='val'),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='TopKAccuracy', topk=(1, 5))
test_evaluator = val_evaluator
