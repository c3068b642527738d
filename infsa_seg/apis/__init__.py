# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the tools do, as functions."""

from .checkpoints import convert_zero
from .config import load_config
from .estimate import Estimate, estimate_memory
from .estimate_report import describe_estimate
from .infer import InferResult, infer
from .inference import inference, init_model
from .large import (
    LargeOptions,
    LargeResult,
    LargeResults,
    infer_large,
    infer_large_image,
    large_choices,
    plan_large_image,
)
from .runner import evaluate, train

__all__ = [
    'Estimate',
    'InferResult',
    'LargeOptions',
    'LargeResult',
    'LargeResults',
    'convert_zero',
    'describe_estimate',
    'estimate_memory',
    'evaluate',
    'infer',
    'infer_large',
    'infer_large_image',
    'inference',
    'init_model',
    'large_choices',
    'load_config',
    'plan_large_image',
    'train',
]
