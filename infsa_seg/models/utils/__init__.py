# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the models share."""

from .network import SegmentorNetwork
from .weights import LoadReport, check_checkpoint, load_pretrained

__all__ = [
    'LoadReport',
    'SegmentorNetwork',
    'check_checkpoint',
    'load_pretrained',
]
