# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the tools do, as functions."""

from .checkpoints import convert_zero
from .config import load_config
from .estimate import Estimate, estimate_memory
from .estimate_report import describe_estimate
from .infer import InferResult, infer
from .inference import classify, inference, init_model
from .large import (
    LargeOptions,
    LargeResult,
    LargeResults,
    infer_large,
    infer_large_image,
    large_choices,
    plan_large_image,
)
from .pretrain import PretrainResult, export_backbone, pretrain
from .runner import evaluate, train
from .to_infvit import convert_to_infvit

__all__ = [
    'Estimate',
    'InferResult',
    'LargeOptions',
    'LargeResult',
    'LargeResults',
    'PretrainResult',
    'classify',
    'convert_to_infvit',
    'convert_zero',
    'describe_estimate',
    'estimate_memory',
    'evaluate',
    'export_backbone',
    'infer',
    'infer_large',
    'infer_large_image',
    'inference',
    'init_model',
    'large_choices',
    'load_config',
    'plan_large_image',
    'pretrain',
    'train',
]
