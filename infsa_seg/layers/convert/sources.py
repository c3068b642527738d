# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What other projects' attention layers hold, and what takes their place.

A layer is told by what it holds: one that holds anything else than the
projections and what follows them is not taken for what it is not. None of
those projects is imported.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..attention import InfSAAttention
from . import adapters
from .parts import (
    Parts,
    Refused,
    children,
    count_heads,
    drop_rate,
    find_reduction,
    holds,
    need_absent,
    need_only,
    need_plain,
    projection,
)


def take_apart(module: nn.Module) -> Parts | None:
    """The parts of an attention layer of a known structure, or None.

    Raises:
        Refused: the structure is known, but cannot be copied exactly.
    """
    for reader in (_multihead, _wrapped, _efficient, _fused, _pyramid, _vit):
        parts = reader(module)
        if parts is not None:
            return parts
    return None


def _multihead(module: Any) -> Parts | None:
    """PyTorch's own nn.MultiheadAttention."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if type(module) is not nn.MultiheadAttention:
        raise Refused('a subclass of nn.MultiheadAttention of unknown forward')
    if module.bias_k is not None or module.add_zero_attn:
        raise Refused('add_bias_kv and add_zero_attn add keys of their own')
    biases: Iterable[Tensor | None] = [None] * 3
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        need_plain(module, 'in_proj_weight', 'in_proj_bias')
        weights: Iterable[Tensor] = module.in_proj_weight.chunk(3)
    else:
        names = ('q_proj_weight', 'k_proj_weight', 'v_proj_weight')
        need_plain(module, *names, 'in_proj_bias')
        weights = [getattr(module, name) for name in names]
    q, k, v = zip(weights, biases, strict=True)
    return Parts(
        q,
        k,
        v,
        projection(module.out_proj, 'out_proj'),
        module.num_heads,
        module.dropout,
        lambda attn: attn,
        batch_first=module.batch_first,
    )


def _wrapped(module: Any) -> Parts | None:
    """The MultiheadAttention of mmcv, around PyTorch's."""
    if not holds(module, {'attn', 'proj_drop', 'dropout_layer'}):
        return None
    inner = module.attn
    if type(module).__name__ != 'MultiheadAttention' or not isinstance(
        inner, nn.MultiheadAttention
    ):
        return None
    parts = _multihead(inner)
    assert parts is not None
    first = bool(getattr(module, 'batch_first', False))
    after = children(module, 'proj_drop', 'dropout_layer')
    return dataclasses.replace(
        parts,
        replace=lambda attn: adapters.WrappedAttention(
            attn, *after, batch_first=first
        ),
        probe=lambda x: (x if first else x.transpose(0, 1),),
        batch_first=first,
    )


def _efficient(module: Any) -> Parts | None:
    """The EfficientMultiheadAttention of mmsegmentation."""
    if not holds(
        module, {'attn', 'proj_drop', 'dropout_layer'}, {'sr', 'norm'}
    ):
        return None
    if type(module).__name__ != 'EfficientMultiheadAttention':
        return None
    parts = _multihead(module.attn)
    if parts is None or not getattr(module, 'batch_first', False):
        return None
    after = children(module, 'proj_drop', 'dropout_layer')
    reduction, norm, grid = find_reduction(module, 'sr', 'norm')
    return dataclasses.replace(
        parts,
        replace=lambda attn: adapters.EfficientAttention(
            attn, *after, reduction=reduction, norm=norm
        ),
        probe=lambda x: (x, grid),
        grid=grid,
        batch_first=True,
        reduced=reduction is not None,
    )


def _fused(module: Any) -> Parts | None:
    """One projection for q, k and v: timm, DINOv2, mmpretrain and kin."""
    qkv = module._modules.get('qkv')
    if qkv is None or 'proj' not in module._modules:
        return None
    for name in ('q_norm', 'k_norm', 'norm'):
        need_absent(module, name, 'normalises queries, keys or the output')
    if getattr(module, 'v_shortcut', False):
        raise Refused('v_shortcut adds the values to the output')
    need_only(
        module,
        {'qkv', 'proj', 'attn_drop', 'proj_drop', 'out_drop', 'gamma1'},
    )
    weight, bias = projection(qkv, 'qkv')
    if weight.shape[0] != 3 * weight.shape[1]:
        raise Refused(
            f'its projection qkv goes from {weight.shape[1]} to '
            f'{weight.shape[0]} channels, not thrice as many'
        )
    biases: Iterable[Tensor | None] = [None] * 3
    if bias is not None:
        biases = bias.chunk(3)
    q, k, v = zip(weight.chunk(3), biases, strict=True)
    after = children(module, 'proj_drop', 'gamma1', 'out_drop')
    return Parts(
        q,
        k,
        v,
        projection(module.proj, 'proj'),
        count_heads(module, weight.shape[1]),
        drop_rate(module, 'attn_drop'),
        lambda attn: adapters.FusedAttention(attn, *after),
        probe=lambda x: (x,),
    )


def _pyramid(module: Any) -> Parts | None:
    """Keys from a reduced grid: PVT, and SegFormer as first published."""
    if not holds(
        module, {'q', 'kv', 'attn_drop', 'proj', 'proj_drop'}, {'sr', 'norm'}
    ):
        return None
    weight, bias = projection(module.kv, 'kv')
    biases: Iterable[Tensor | None] = [None] * 2
    if bias is not None:
        biases = bias.chunk(2)
    k, v = zip(weight.chunk(2), biases, strict=True)
    q = projection(module.q, 'q')
    after = children(module, 'proj_drop')
    reduction, norm, grid = find_reduction(module, 'sr', 'norm')
    return Parts(
        q,
        k,
        v,
        projection(module.proj, 'proj'),
        count_heads(module, q[0].shape[1]),
        drop_rate(module, 'attn_drop'),
        lambda attn: adapters.PyramidAttention(
            attn, *after, reduction=reduction, norm=norm
        ),
        probe=lambda x: (x, *grid),
        grid=grid,
        reduced=reduction is not None,
    )


def _vit(module: Any) -> Parts | None:
    """The ViT and SegFormer layers of Hugging Face's transformers."""
    inner: Any
    for name in ('attention', 'self'):
        if holds(module, {name, 'output'}):
            inner = module._modules[name]
            break
    else:
        return None
    output: Any = module.output
    if not holds(
        inner, {'query', 'key', 'value'}, {'dropout', 'sr', 'layer_norm'}
    ) or not holds(output, {'dense', 'dropout'}):
        return None
    as_tuple = (
        'output_attentions'
        in inspect.signature(type(module).forward).parameters
    )
    q = projection(inner.query, 'query')
    after = children(output, 'dropout')
    if name == 'attention':
        grid = (2, 3)

        def replace(attn: InfSAAttention) -> nn.Module:
            return adapters.VisionAttention(attn, *after, as_tuple=as_tuple)

        def probe(x: Tensor) -> tuple[object, ...]:
            return (x,)
    else:
        reduction, norm, grid = find_reduction(inner, 'sr', 'layer_norm')

        def replace(attn: InfSAAttention) -> nn.Module:
            return adapters.SegformerAttention(
                attn,
                *after,
                reduction=reduction,
                norm=norm,
                as_tuple=as_tuple,
            )

        def probe(x: Tensor) -> tuple[object, ...]:
            return (x, *grid)

    return Parts(
        q,
        projection(inner.key, 'key'),
        projection(inner.value, 'value'),
        projection(output.dense, 'dense'),
        count_heads(inner, q[0].shape[1]),
        # A module in older releases, a number in newer ones.
        drop_rate(inner, 'dropout') or drop_rate(inner, 'dropout_prob'),
        replace,
        probe,
        grid,
        reduced='sr' in inner._modules,
    )
