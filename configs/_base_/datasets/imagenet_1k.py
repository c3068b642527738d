# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# dataset settings
dataset_type = 'ImageNet'
data_root = 'data/imagenet'
crop_size = 224
train_pipeline = [
    dict(type='LoadPicture'),
    dict(type='RandomResizedCrop', scale=crop_size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandAugment', num_ops=2, magnitude=9),
    dict(type='PackClsInputs'),
]
test_pipeline = [
    dict(type='LoadPicture'),
    # The short side becomes 256, whatever the long one.
    dict(
        type='Resize',
        scale=(65536, 256),
        keep_ratio=True,
        interpolation='bicubic',
        backend='pillow',
    ),
    dict(type='CenterCrop', crop_size=crop_size),
    dict(type='PackClsInputs'),
]
train_dataloader = dict(
    batch_size=128,
    num_workers=8,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='RepeatedAugSampler', num_repeats=3),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='train'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=8,
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
