# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Losses, registered with mmsegmentation."""

from .band_loss import BandCrossEntropyLoss, Terms

__all__ = ['BandCrossEntropyLoss', 'Terms']
