# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
_base_ = [
    '../_base_/models/infvit_classifier.py',
    '../_base_/datasets/imagenet_1k.py',
    '../_base_/pretrain_runtime.py',
    '../_base_/schedules/schedule_deit.py',
]
