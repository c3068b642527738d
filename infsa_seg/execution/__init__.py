# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Executors: they run the steps of a network, and know no model."""

from .bands import Grid, Image, read_token_mask
from .classes import class_rows, classify, probabilities
from .communication import Communication, communication
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
from .spatial_parallel import (
    BandLogits,
    ParallelDims,
    SpatialParallel,
    spatial_forward,
)
from .streaming import ImportanceSink, Streaming
from .token_store import FileStore, RamStore, TokenStore
from .training_plan import (
    AbsentRanks,
    Activations,
    ZeroShares,
    foresee_activations,
    zero_shares,
)
from .whole import TensorImage, run_bands, run_whole

__all__ = [
    'AbsentRanks',
    'Activations',
    'BandLogits',
    'Communication',
    'FileStore',
    'Grid',
    'Image',
    'ImportanceSink',
    'Journal',
    'Layout',
    'ParallelDims',
    'Piece',
    'Plan',
    'RamStore',
    'SpatialParallel',
    'Streaming',
    'TensorImage',
    'TokenStore',
    'ZeroShares',
    'class_rows',
    'classify',
    'communication',
    'foresee_activations',
    'format_bytes',
    'make_plan',
    'matmul_rate',
    'parse_bytes',
    'probabilities',
    'read_token_mask',
    'resident_bytes',
    'run_bands',
    'run_whole',
    'spatial_forward',
    'zero_shares',
]
