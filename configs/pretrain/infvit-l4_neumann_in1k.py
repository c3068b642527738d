# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
_base_ = './infvit-tiny_neumann_in1k.py'

model = dict(backbone=dict(arch='l4'))
