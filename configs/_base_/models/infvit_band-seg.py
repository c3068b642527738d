# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# InfViT-tiny with the band-wise head. Heirs set the number of classes and,
# where their patches are smaller, the number of upsamplings.
data_preprocessor = dict(
    type='SegDataPreProcessor',
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
    pad_val=0,
    seg_pad_val=255,
)
model = dict(
    type='BandEncoderDecoder',
    data_preprocessor=data_preprocessor,
    backbone=dict(
        type='InfViT',
        arch='tiny',
        img_size=512,
        patch_size=16,
        out_indices=(3, 7, 11),
        drop_path_rate=0.1,
        ffn='dwconv',
        attn_cfg=dict(variant='neumann'),
    ),
    decode_head=dict(
        type='BandSegHead',
        in_channels=[192, 192, 192],
        in_index=[0, 1, 2],
        channels=64,
        num_classes=19,
        num_upsamples=2,
        dropout_ratio=0.1,
        loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
