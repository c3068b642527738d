# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Crops of 4096 x 4096 (65,536 tokens). The scenes are drawn by window, so the
# config trains without any data at hand; inherit it and put your own in.
#
# ZeRO-2 in bfloat16, on one process or many:
#     torchrun --nproc_per_node=8 tools/train.py configs/infvit_seg_4k.py \
#         --launcher pytorch
# Where a crop does not fit, --spatial-parallel-size 2 shares it between two.
# Without DeepSpeed: --cfg-options strategy=None
_base_ = [
    './_base_/models/infvit_band-seg.py',
    './_base_/datasets/synthetic_scenes_4k.py',
    './_base_/default_runtime.py',
    './_base_/schedules/schedule_4k.py',
    './_base_/strategies/zero2.py',
]

model = dict(
    data_preprocessor=dict(size=(4096, 4096)),
    backbone=dict(
        arch='small',
        # The grid of positions is learnt at 64 x 64 and resampled.
        img_size=1024,
        out_indices=(3, 7, 11),
        with_cp=True,
    ),
    decode_head=dict(
        in_channels=[384, 384, 384],
        num_classes=8,
        # Not even the logits of all pixels are in memory.
        loss_decode=dict(_delete_=True, type='BandCrossEntropyLoss'),
    ),
)
