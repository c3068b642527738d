# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# A few minutes on two CPU cores.
_base_ = './adamw.py'

optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=50,
        end=800,
    ),
]
train_cfg = dict(max_iters=800, val_interval=400)
default_hooks = dict(checkpoint=dict(interval=400))
