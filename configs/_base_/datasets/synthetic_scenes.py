# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# dataset settings
# Scenes are drawn as they are asked for: nothing to download, and no image
# comes twice in a short training, so that nothing is augmented either.
dataset_type = 'SyntheticScenes'
crop_size = (128, 128)
train_pipeline = [
    dict(type='LoadSyntheticScene'),
    dict(type='PackSegInputs'),
]
test_pipeline = train_pipeline
tta_pipeline = [
    dict(type='LoadSyntheticScene'),
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
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        num_scenes=8192,
        size=crop_size,
        cue='scene',
        patch=8,
        cue_repeats=4,
        seed=0,
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        num_scenes=64,
        size=crop_size,
        cue='scene',
        patch=8,
        cue_repeats=4,
        seed=1,
        pipeline=test_pipeline,
    ),
)
test_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        num_scenes=128,
        size=crop_size,
        cue='scene',
        patch=8,
        cue_repeats=4,
        seed=2,
        pipeline=test_pipeline,
    ),
)

val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
