# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# The schedule of SegFormer and its like, for crops of 4096 x 4096.
_base_ = './adamw.py'

optim_wrapper = dict(optimizer=dict(lr=6e-5))
param_scheduler = [
    dict(
        type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=1500
    ),
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=1500,
        end=160000,
    ),
]
train_cfg = dict(max_iters=160000, val_interval=8000)
default_hooks = dict(checkpoint=dict(interval=8000))
