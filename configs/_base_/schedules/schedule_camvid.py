# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# What fits in about 40 minutes on two CPU cores: 13 epochs of 367 images.
_base_ = './adamw.py'

optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=60),
    dict(
        type='PolyLR',
        power=0.9,
        eta_min=0.0,
        by_epoch=False,
        begin=60,
        end=1200,
    ),
]
train_cfg = dict(max_iters=1200, val_interval=400)
default_hooks = dict(checkpoint=dict(interval=400))
