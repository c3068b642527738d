# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What training and testing need beside models and data."""

from .accuracy import TopKAccuracy
from .files import AtomicBackend, atomic_path
from .hooks import (
    DeadHeadsHook,
    DiscountsHook,
    EMAHook,
    InputVisualizationHook,
    MetersHook,
    NonFiniteError,
    NonFiniteHook,
    SafeCheckpointHook,
    SetEpochHook,
    WeightsFitHook,
)
from .layer_decay import LayerDecayConstructor
from .log_processor import ShortLogProcessor
from .train_loop import SeededTrainLoop
from .zero_checkpoint import ZeroFolder, require_deepspeed
from .zero_strategy import ZeroStrategy, leave_group

__all__ = [
    'AtomicBackend',
    'DeadHeadsHook',
    'DiscountsHook',
    'EMAHook',
    'InputVisualizationHook',
    'LayerDecayConstructor',
    'MetersHook',
    'NonFiniteError',
    'NonFiniteHook',
    'SafeCheckpointHook',
    'SeededTrainLoop',
    'SetEpochHook',
    'ShortLogProcessor',
    'TopKAccuracy',
    'WeightsFitHook',
    'ZeroFolder',
    'ZeroStrategy',
    'atomic_path',
    'leave_group',
    'require_deepspeed',
]
