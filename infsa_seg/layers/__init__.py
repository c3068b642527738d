# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Modules without a registry, and the protocol that executors see."""

from .attention import InfSAAttention
from .block import Block, GlobalBranch, LocalBranch
from .ffn import FFN
from .norm import ChannelLayerNorm
from .patch_embed import PatchEmbed
from .position import PositionEmbedding
from .protocol import GlobalOp, LocalOp, identity, run_global, zero_rows
from .variants import LinearInfSA, NeumannInfSA, PureInfSA, SoftmaxAttention

__all__ = [
    'FFN',
    'Block',
    'ChannelLayerNorm',
    'GlobalBranch',
    'GlobalOp',
    'InfSAAttention',
    'LinearInfSA',
    'LocalBranch',
    'LocalOp',
    'NeumannInfSA',
    'PatchEmbed',
    'PositionEmbedding',
    'PureInfSA',
    'SoftmaxAttention',
    'identity',
    'run_global',
    'zero_rows',
]
