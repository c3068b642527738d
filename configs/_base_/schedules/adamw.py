# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# What all schedules share; they set the rate and the number of iterations.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(
        type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05
    ),
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(
        # Norms, biases, discounts and temperatures have one dimension.
        flat_decay_mult=0.0,
        custom_keys={
            'cls_token': dict(decay_mult=0.0),
            'landmarks': dict(decay_mult=0.0),
            'position': dict(decay_mult=0.0),
        },
    ),
)

# An iteration is a function of the seed and its number, so that a resumed
# training does what it would have done.
train_cfg = dict(type='SeededTrainLoop')
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='SafeCheckpointHook',
        by_epoch=False,
        max_keep_ckpts=2,
        save_best='mIoU',
        backend_args=dict(backend='atomic'),
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='InputVisualizationHook'),
    weights_fit=dict(type='WeightsFitHook'),
    nonfinite=dict(type='NonFiniteHook'),
    set_epoch=dict(type='SetEpochHook'),
    dead_heads=dict(type='DeadHeadsHook'),
    discounts=dict(type='DiscountsHook'),
    meters=dict(type='MetersHook'),
)
