# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# 367 images at batch 8: 46 iterations to the epoch.
_base_ = './adamw.py'

optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=200),
    dict(
        type='PolyLR',
        power=0.9,
        eta_min=0.0,
        by_epoch=False,
        begin=200,
        end=4000,
    ),
]
train_cfg = dict(max_iters=4000, val_interval=500)
default_hooks = dict(checkpoint=dict(interval=500))
