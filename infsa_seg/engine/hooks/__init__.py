# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Hooks for mmengine's runners."""

from .checkpoint_hook import SafeCheckpointHook
from .dead_heads_hook import DeadHeadsHook
from .discounts_hook import DiscountsHook
from .ema_hook import EMAHook
from .meters_hook import MetersHook
from .nonfinite_hook import NonFiniteError, NonFiniteHook
from .set_epoch_hook import SetEpochHook
from .visualization_hook import InputVisualizationHook
from .weights_fit_hook import WeightsFitHook

__all__ = [
    'DeadHeadsHook',
    'DiscountsHook',
    'EMAHook',
    'InputVisualizationHook',
    'MetersHook',
    'NonFiniteError',
    'NonFiniteHook',
    'SafeCheckpointHook',
    'SetEpochHook',
    'WeightsFitHook',
]
