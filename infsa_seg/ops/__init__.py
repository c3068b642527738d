# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The operators: functions on tensors, and the states they add up."""

from .graphs import (
    crelu,
    landmark_keys,
    landmark_queries,
    landmark_temperature,
)
from .linear import EnergyState, ScoreState, linear_infsa
from .neumann import NeumannState, neumann_chain, neumann_graph
from .reference import pure_infsa, softmax_attention
from .rows import Rows, bands_of, split_rows
from .state import Context, CountState, State, merge_all, sum_dtype
from .tokens import count_tokens, hide

__all__ = [
    'Context',
    'CountState',
    'EnergyState',
    'NeumannState',
    'Rows',
    'ScoreState',
    'State',
    'bands_of',
    'count_tokens',
    'crelu',
    'hide',
    'landmark_keys',
    'landmark_queries',
    'landmark_temperature',
    'linear_infsa',
    'merge_all',
    'neumann_chain',
    'neumann_graph',
    'pure_infsa',
    'softmax_attention',
    'split_rows',
    'sum_dtype',
]
