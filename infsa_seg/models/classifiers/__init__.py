# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Classifiers, to pretrain backbones with."""

from .data_preprocessor import ClsDataPreprocessor
from .infvit_classifier import InfViTClassifier

__all__ = ['ClsDataPreprocessor', 'InfViTClassifier']
