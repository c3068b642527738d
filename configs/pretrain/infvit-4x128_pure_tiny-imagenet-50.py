# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Pure InfSA, quadratic in the number of tokens.
_base_ = './infvit-4x128_neumann_tiny-imagenet-50.py'

model = dict(backbone=dict(attn_cfg=dict(variant='pure')))
