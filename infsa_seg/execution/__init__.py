# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Executors: they run the steps of a network, and know no model."""

from .bands import Grid, Image, read_token_mask
from .classes import class_rows, classify, probabilities
from .layout import Layout
from .plan import (
    Plan,
    format_bytes,
    make_plan,
    matmul_rate,
    parse_bytes,
    resident_bytes,
)
from .resize import Piece
from .resume import Journal
from .streaming import Streaming
from .token_store import FileStore, RamStore, TokenStore
from .whole import TensorImage, run_bands, run_whole

__all__ = [
    'FileStore',
    'Grid',
    'Image',
    'Journal',
    'Layout',
    'Piece',
    'Plan',
    'RamStore',
    'Streaming',
    'TensorImage',
    'TokenStore',
    'class_rows',
    'classify',
    'format_bytes',
    'make_plan',
    'matmul_rate',
    'parse_bytes',
    'probabilities',
    'read_token_mask',
    'resident_bytes',
    'run_bands',
    'run_whole',
]
