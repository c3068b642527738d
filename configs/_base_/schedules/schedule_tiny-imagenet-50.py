# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# 35 to 50 minutes on one CPU core, by the attention.
_base_ = './schedule_deit.py'

optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    # Scores of Linear-InfSA that are nearly all zero have steep gradients.
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        begin=0,
        end=1,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=1e-2,
        begin=1,
        end=8,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=8, val_interval=4)
# Of about half an epoch, and of less at the start.
custom_hooks = [
    dict(
        type='EMAHook',
        ema_type='MomentumAnnealingEMA',
        momentum=5e-3,
        gamma=10,
    )
]
