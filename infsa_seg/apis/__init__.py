# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the tools do, as functions."""

from .config import load_config
from .infer import InferResult, infer
from .inference import inference, init_model
from .runner import evaluate, train

__all__ = [
    'InferResult',
    'evaluate',
    'infer',
    'inference',
    'init_model',
    'load_config',
    'train',
]
