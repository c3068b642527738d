# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# InfViT-tiny with mean pooling, for pictures of 224 x 224. Heirs set arch and
# attention, and the number of classes in both places.
num_classes = 1000
data_preprocessor = dict(
    type='ClsDataPreprocessor',
    # As our segmentors have them.
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
    num_classes=num_classes,
    batch_augments=[
        dict(type='BatchRandomErasing', prob=0.25),
        dict(
            type='MixUpCutMix',
            mixup_alpha=0.8,
            cutmix_alpha=1.0,
            switch_prob=0.5,
        ),
    ],
)
model = dict(
    type='InfViTClassifier',
    data_preprocessor=data_preprocessor,
    backbone=dict(
        type='InfViT',
        arch='tiny',
        img_size=224,
        patch_size=16,
        drop_path_rate=0.1,
        # As our segmentors have it, so that every weight has a place there.
        ffn='dwconv',
        attn_cfg=dict(variant='neumann'),
    ),
    num_classes=num_classes,
    pool='mean',
    label_smoothing=0.1,
)
