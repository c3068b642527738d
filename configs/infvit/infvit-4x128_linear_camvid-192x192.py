# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# The paper's Linear-InfSA.
_base_ = './infvit-4x128_neumann_camvid-192x192.py'

model = dict(backbone=dict(attn_cfg=dict(variant='linear')))
