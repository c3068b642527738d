# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Models, registered so that a plain mmsegmentation config can name them."""

from .backbones import InfViT
from .classifiers import ClsDataPreprocessor, InfViTClassifier
from .decode_heads import BandSegHead
from .losses import BandCrossEntropyLoss, BandDiceLoss
from .segmentors import BandEncoderDecoder

__all__ = [
    'BandCrossEntropyLoss',
    'BandDiceLoss',
    'BandEncoderDecoder',
    'BandSegHead',
    'ClsDataPreprocessor',
    'InfViT',
    'InfViTClassifier',
]
