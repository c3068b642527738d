# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# DeiT's 300 epochs at a batch of 1024: warm-up, cosine, a moving average.
# Other batch sizes: --cfg-options auto_scale_lr.enable=True
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayConstructor',
    optimizer=dict(
        type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05
    ),
    paramwise_cfg=dict(
        # Below 1 to fine-tune; from scratch all layers learn alike.
        decay_rate=1.0,
        # Norms, biases, class token, discounts and temperatures.
        flat_decay_mult=0.0,
        custom_keys={
            'landmarks': dict(decay_mult=0.0),
            'position': dict(decay_mult=0.0),
        },
    ),
)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        begin=0,
        end=5,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        # A ratio: with a decay of the rate from layer to layer, a floor for
        # all would lift the first ones.
        eta_min_ratio=1e-2,
        begin=5,
        end=300,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=300, val_interval=10)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=100),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='SafeCheckpointHook',
        interval=1,
        max_keep_ckpts=2,
        backend_args=dict(backend='atomic'),
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    nonfinite=dict(type='NonFiniteHook'),
    dead_heads=dict(type='DeadHeadsHook'),
    meters=dict(type='MetersHook'),
    weights_fit=dict(type='WeightsFitHook'),
)
custom_hooks = [
    dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=4e-5)
]
