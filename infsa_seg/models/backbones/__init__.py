# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Backbones, registered with mmsegmentation."""

from .infvit import InfViT

__all__ = ['InfViT']
