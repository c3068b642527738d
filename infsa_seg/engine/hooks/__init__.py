# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Hooks for mmengine's runners."""

from .dead_heads_hook import DeadHeadsHook
from .visualization_hook import InputVisualizationHook
from .weights_fit_hook import WeightsFitHook

__all__ = ['DeadHeadsHook', 'InputVisualizationHook', 'WeightsFitHook']
