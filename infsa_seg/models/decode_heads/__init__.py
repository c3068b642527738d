# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Decode heads, registered with mmsegmentation."""

from .band_seg_head import BandSegHead

__all__ = ['BandSegHead']
