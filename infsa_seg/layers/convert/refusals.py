# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Kinds of attention that are something else, each by its name.

The classes of other projects are told by what they are called and what they
hold; none of those projects is imported.
"""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn

_LOOKS_LIKE = re.compile(r'attention|attn|MSA$|MHA$|MLA$', re.IGNORECASE)
_CROSS = re.compile(r'cross_?(attention|attn)', re.IGNORECASE)
_RELATIVE = re.compile(
    r'rel_pos|rel_bias|relative|attention_bias|cpb_mlp|(^|_)(rpe|alibi)'
)
_ROTARY = re.compile(r'(^|_)(rope|rotary)|freqs_cis|position_embeddings$')
_LATENT = re.compile(r'kv_lora_rank|kv_a_proj|kv_b_proj|kv_down_proj')
_QUERY_HEADS = ('num_attention_heads', 'num_heads', 'n_heads', 'n_head')
_KEY_HEADS = (
    'num_key_value_heads',
    'num_kv_heads',
    'n_kv_heads',
    'n_kv_head',
    'kv_heads',
)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether the class is named so and there is something to learn in it."""
    return bool(_LOOKS_LIKE.search(type(module).__name__)) and any(
        True for _ in module.parameters()
    )


def why_refused(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why a layer that looks like attention is of a kind not converted.

    Args:
        module: the layer.
        parent: the module that holds it.

    Returns:
        The kind, in words; None where nothing speaks against it.
    """
    inner = [module]
    for name in ('attention', 'self'):
        child = module._modules.get(name)
        if child is not None:
            inner.append(child)
    for layer in inner:
        reason = _kind(layer)
        if reason is not None:
            return reason
    if isinstance(parent, nn.TransformerDecoderLayer):
        if module is parent.multihead_attn:
            return 'cross-attention, which is called with masks'
        return 'causal attention of a decoder, which is called with a mask'
    return None


def _kind(layer: nn.Module) -> str | None:
    held = _names_held(layer)
    arguments = set(inspect.signature(type(layer).forward).parameters)
    if any(map(_LATENT.search, {*held, *vars(layer)})):
        return 'multi-head latent attention, whose keys share a projection'
    grouped = _grouped_queries(layer)
    if grouped is not None:
        return grouped
    if _is_causal(layer):
        return 'causal attention, where a token sees only those before it'
    if (
        _CROSS.search(type(layer).__name__)
        or getattr(layer, 'is_cross_attention', False)
        or getattr(layer, 'operation_name', None) == 'cross_attn'
    ):
        return 'cross-attention, which is called with masks'
    if any(map(_RELATIVE.search, held)):
        return 'attention with a bias of relative positions'
    if any(map(_ROTARY.search, {*held, *arguments})):
        return 'attention with rotary positions'
    return None


def _names_held(layer: nn.Module) -> set[str]:
    """Names of its own parameters, buffers and modules that are not None."""
    return {
        name
        for group in (layer._parameters, layer._buffers, layer._modules)
        for name, value in group.items()
        if value is not None
    }


def _grouped_queries(layer: nn.Module) -> str | None:
    owners = (layer, getattr(layer, 'config', None))
    queries, keys = (
        next(
            (
                value
                for owner in owners
                for name in names
                if isinstance(value := getattr(owner, name, None), int)
            ),
            None,
        )
        for names in (_QUERY_HEADS, _KEY_HEADS)
    )
    groups = getattr(layer, 'num_key_value_groups', None)
    if queries and keys and queries != keys:
        return (
            f'grouped-query attention, where {queries} heads of queries '
            f'share {keys} of keys'
        )
    if isinstance(groups, int) and groups > 1:
        return f'grouped-query attention, where {groups} heads share keys'
    return None


def _is_causal(layer: nn.Module) -> bool:
    if 'causal' in type(layer).__name__.lower() or any(
        getattr(layer, name, None) is True
        for name in ('is_causal', 'causal', 'is_decoder')
    ):
        return True
    return any(
        buffer is not None
        and buffer.dim() >= 2
        and buffer.shape[-1] == buffer.shape[-2] > 1
        and not buffer.is_meta
        and _hides_what_follows(buffer)
        for buffer in layer._buffers.values()
    )


def _hides_what_follows(mask: torch.Tensor) -> bool:
    """Whether a square buffer is a triangle of ones, zeros or -inf."""
    square = mask.reshape(-1, *mask.shape[-2:])[0]
    kept = ~torch.isinf(square) & (square == square[0, 0])
    return bool((kept == torch.ones_like(kept).tril()).all())
