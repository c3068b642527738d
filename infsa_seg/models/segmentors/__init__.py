# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Segmentors."""

from .band_encoder_decoder import BandEncoderDecoder
from .spatial import spatial_loss

__all__ = ['BandEncoderDecoder', 'spatial_loss']
