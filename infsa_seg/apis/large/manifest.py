# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a result was computed from, and how."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from mmengine.model import BaseModel

import infsa_seg

from .options import LargeOptions


def digest_of(model: BaseModel) -> str:
    """A number that models of the same weights have in common."""
    digest = hashlib.blake2b(digest_size=16)
    for key, value in model.state_dict().items():
        digest.update(key.encode())
        array = value.detach().cpu().contiguous().flatten()
        digest.update(array.view(torch.uint8).numpy())
    return digest.hexdigest()


def describe_run(
    model: BaseModel, name: str, options: LargeOptions
) -> dict[str, Any]:
    """Model, input and options, as JSON has them.

    Args:
        model (BaseModel): What segments.
        name (str): The input, as the user has it.
        options (LargeOptions): Those that are not left to their defaults are
            told.
    """
    config = getattr(model.cfg, 'filename', None)
    chosen = {
        field.name: value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }
    return {
        'input': name,
        'software': f'infsa_seg {infsa_seg.__version__}',
        'model': {
            'config': None if config is None else Path(config).name,
            'backbone': type(model.backbone).__name__,
            'weights_blake2b': digest_of(model),
        },
        'options': json.loads(json.dumps(chosen, default=str)),
    }
