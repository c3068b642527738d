# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the models share."""

from .classifier_network import ClassifierNetwork
from .network import SegmentorNetwork
from .weights import LoadReport, check_checkpoint, load_pretrained

__all__ = [
    'ClassifierNetwork',
    'LoadReport',
    'SegmentorNetwork',
    'check_checkpoint',
    'load_pretrained',
]
