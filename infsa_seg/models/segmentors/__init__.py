# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Segmentors."""

from .band_encoder_decoder import BandEncoderDecoder

__all__ = ['BandEncoderDecoder']
