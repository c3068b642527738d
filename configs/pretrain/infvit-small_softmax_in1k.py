# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Softmax attention, for comparison.
_base_ = './infvit-small_neumann_in1k.py'

model = dict(backbone=dict(attn_cfg=dict(variant='softmax')))
