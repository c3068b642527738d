# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Losses, registered with mmsegmentation."""

from .band_loss import BandCrossEntropyLoss, BandDiceLoss, BandLoss, Terms

__all__ = ['BandCrossEntropyLoss', 'BandDiceLoss', 'BandLoss', 'Terms']
