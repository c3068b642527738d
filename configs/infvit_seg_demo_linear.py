# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
_base_ = './infvit_seg_demo.py'

model = dict(backbone=dict(attn_cfg=dict(variant='linear')))
