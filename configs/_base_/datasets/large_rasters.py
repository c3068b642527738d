# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# dataset settings
# Windows straight from rasters of any size and their masks, without tiles.
# Heirs name their folders, and classes in metainfo.
dataset_type = 'LargeRasters'
data_root = 'data/rasters'
crop_size = (4096, 4096)
metainfo = dict(
    classes=('background', 'building'),
    palette=[[96, 96, 96], [230, 80, 60]],
)
train_pipeline = [
    # From above, no direction is special. Drawn before the window is read,
    # so that processes that share an image read their rows only.
    dict(
        type='DrawFlip',
        prob=[0.25, 0.25, 0.25],
        direction=['horizontal', 'vertical', 'diagonal'],
    ),
    dict(type='LoadWindow'),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadWindow'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='LoadWindow'),
    dict(
        type='TestTimeAug',
        transforms=[
            [
                dict(type='RandomFlip', prob=0.0, direction='horizontal'),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
            ],
            [dict(type='PackSegInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(
            img_path='img_dir/train', seg_map_path='ann_dir/train'
        ),
        metainfo=metainfo,
        window=crop_size,
        mode='balanced',
        # More than a training has iterations: no window comes twice.
        length=1_000_000,
        min_valid=0.5,
        seed=0,
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='img_dir/val', seg_map_path='ann_dir/val'),
        metainfo=metainfo,
        window=crop_size,
        mode='grid',
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
