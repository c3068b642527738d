# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Procedurally drawn scenes; numpy only, no registry."""

from .scene import PAINTERS, Scene

__all__ = ['PAINTERS', 'Scene']
