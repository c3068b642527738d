# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Pure InfSA, quadratic in the number of tokens.
_base_ = './infvit-l4_neumann_in1k.py'

model = dict(backbone=dict(attn_cfg=dict(variant='pure')))
