# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Modules without a registry, and the protocol that executors see."""

from .attention import InfSAAttention
from .block import Block, GlobalBranch, LocalBranch
from .ffn import FFN
from .linear import LinearInfSA
from .neumann import FrobeniusInfSA, LandmarkInfSA, NeumannInfSA, RowInfSA
from .norm import ChannelLayerNorm
from .patch_embed import PatchEmbed
from .position import PositionEmbedding
from .protocol import GlobalOp, LocalOp, identity, run_global, zero_rows
from .quadratic import PureInfSA, SoftmaxAttention

__all__ = [
    'FFN',
    'Block',
    'ChannelLayerNorm',
    'FrobeniusInfSA',
    'GlobalBranch',
    'GlobalOp',
    'InfSAAttention',
    'LandmarkInfSA',
    'LinearInfSA',
    'LocalBranch',
    'LocalOp',
    'NeumannInfSA',
    'PatchEmbed',
    'PositionEmbedding',
    'PureInfSA',
    'RowInfSA',
    'SoftmaxAttention',
    'identity',
    'run_global',
    'zero_rows',
]
