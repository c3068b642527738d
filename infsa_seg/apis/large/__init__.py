# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Images of any size, in a set amount of memory."""

from .infer_large import (
    LargeResults,
    infer_large,
    infer_large_image,
    plan_large_image,
)
from .job import LargeResult
from .options import LargeOptions, large_choices

__all__ = [
    'LargeOptions',
    'LargeResult',
    'LargeResults',
    'infer_large',
    'infer_large_image',
    'large_choices',
    'plan_large_image',
]
