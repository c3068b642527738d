# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The operators: functions on tensors, and the states they add up."""

from .graphs import (
    FEATURE_MAPS,
    crelu,
    focused,
    landmark_keys,
    landmark_queries,
    landmark_temperature,
    relu,
    signed,
)
from .linear import EnergyState, ScoreState, linear_infsa
from .neumann import (
    NeumannState,
    WalkState,
    neumann_chain,
    neumann_graph,
    neumann_rows,
)
from .recurrence import iterate_keys, key_recurrence
from .reference import pure_infsa, softmax_attention
from .resize import Axis, Place, resize_part
from .rows import Rows, bands_of, split_rows
from .state import Context, CountState, State, merge_all, sum_dtype
from .tokens import count_tokens, hide

__all__ = [
    'FEATURE_MAPS',
    'Axis',
    'Context',
    'CountState',
    'EnergyState',
    'NeumannState',
    'Place',
    'Rows',
    'ScoreState',
    'State',
    'WalkState',
    'bands_of',
    'count_tokens',
    'crelu',
    'focused',
    'hide',
    'iterate_keys',
    'key_recurrence',
    'landmark_keys',
    'landmark_queries',
    'landmark_temperature',
    'linear_infsa',
    'merge_all',
    'neumann_chain',
    'neumann_graph',
    'neumann_rows',
    'pure_infsa',
    'relu',
    'resize_part',
    'signed',
    'softmax_attention',
    'split_rows',
    'sum_dtype',
]
