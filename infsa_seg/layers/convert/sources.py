# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What other projects' attention layers hold, and what takes their place.

A layer is told by what it holds: one that holds anything else than the
projections and what follows them is not taken for what it is not.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..attention import InfSAAttention
from . import adapters

Projection = tuple[Tensor, Tensor | None]


class Refused(ValueError):
    """A layer cannot be copied exactly; the text says why."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """An attention layer taken apart.

    Attributes:
        q, k, v, out: weight and bias (or None) of each projection.
        num_heads: heads H.
        dropout: rate at which the layer drops weights in training.
        replace: makes the replacement of the layer from an attention that
            holds its weights.
        probe: makes arguments for a call of the layer of tokens (1, N, C);
            None where its forward need not be tried.
        grid: rows and columns of the tokens of that call.
        batch_first: order of the dimensions that the attention must take.
        reduced: whether keys are fewer than queries.
    """

    q: Projection
    k: Projection
    v: Projection
    out: Projection
    num_heads: int
    dropout: float
    replace: Callable[[InfSAAttention], nn.Module]
    probe: Callable[[Tensor], tuple[object, ...]] | None = None
    grid: tuple[int, int] = (2, 3)
    batch_first: bool = True
    reduced: bool = False

    def __post_init__(self) -> None:
        for weight, _ in (self.q, self.k, self.v, self.out):
            if weight.dim() != 2:
                raise Refused(
                    f'a weight has the shape {tuple(weight.shape)}; gather '
                    'what is spread over processes first'
                )
        width = self.q[0].shape[1]
        if width % self.num_heads:
            raise Refused(f'{self.num_heads} heads do not divide {width}')
        for name in ('q', 'k', 'v', 'out'):
            shape = tuple(getattr(self, name)[0].shape)
            square = name in ('q', 'out')
            if shape[0] != width or (square and shape[1] != width):
                raise Refused(
                    f'its projection {name} goes from {shape[1]} to '
                    f'{shape[0]} channels, not to the {width} of the input'
                )

    def tensors(self) -> Iterable[Tensor]:
        """The weights and biases that are copied."""
        for pair in (self.q, self.k, self.v, self.out):
            yield from (x for x in pair if x is not None)


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


def _multihead(module: nn.Module) -> Parts | None:
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
        _need_plain(module, 'in_proj_weight', 'in_proj_bias')
        weights: Iterable[Tensor] = module.in_proj_weight.chunk(3)
    else:
        names = ('q_proj_weight', 'k_proj_weight', 'v_proj_weight')
        _need_plain(module, *names, 'in_proj_bias')
        weights = [getattr(module, name) for name in names]
    q, k, v = zip(weights, biases, strict=True)
    return Parts(
        q,
        k,
        v,
        _projection(module.out_proj, 'out_proj'),
        module.num_heads,
        module.dropout,
        lambda attn: attn,
        batch_first=module.batch_first,
    )


def _wrapped(module: nn.Module) -> Parts | None:
    """mmcv's MultiheadAttention around PyTorch's."""
    if not _holds(module, {'attn', 'proj_drop', 'dropout_layer'}):
        return None
    inner = module.attn
    if type(module).__name__ != 'MultiheadAttention' or not isinstance(
        inner, nn.MultiheadAttention
    ):
        return None
    parts = _multihead(inner)
    assert parts is not None
    first = bool(getattr(module, 'batch_first', False))
    after = _after(module, 'proj_drop', 'dropout_layer')
    return dataclasses.replace(
        parts,
        replace=lambda attn: adapters.WrappedAttention(
            attn, *after, batch_first=first
        ),
        probe=lambda x: (x if first else x.transpose(0, 1),),
        batch_first=first,
    )


def _efficient(module: nn.Module) -> Parts | None:
    """mmsegmentation's EfficientMultiheadAttention."""
    if not _holds(
        module, {'attn', 'proj_drop', 'dropout_layer'}, {'sr', 'norm'}
    ):
        return None
    if type(module).__name__ != 'EfficientMultiheadAttention':
        return None
    parts = _multihead(module.attn)
    if parts is None or not getattr(module, 'batch_first', False):
        return None
    after = _after(module, 'proj_drop', 'dropout_layer')
    reduction, norm, grid = _reduction(module, 'sr', 'norm')
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


def _fused(module: nn.Module) -> Parts | None:
    """One projection for q, k and v: timm, DINOv2, mmpretrain and kin."""
    qkv = module._modules.get('qkv')
    if qkv is None or 'proj' not in module._modules:
        return None
    for name in ('q_norm', 'k_norm', 'norm'):
        _need_nothing(module, name, 'normalises queries, keys or the output')
    if getattr(module, 'v_shortcut', False):
        raise Refused('v_shortcut adds the values to the output')
    _need_only(
        module,
        {'qkv', 'proj', 'attn_drop', 'proj_drop', 'out_drop', 'gamma1'},
    )
    weight, bias = _projection(qkv, 'qkv')
    if weight.shape[0] != 3 * weight.shape[1]:
        raise Refused(
            f'its projection qkv goes from {weight.shape[1]} to '
            f'{weight.shape[0]} channels, not thrice as many'
        )
    biases: Iterable[Tensor | None] = [None] * 3
    if bias is not None:
        biases = bias.chunk(3)
    q, k, v = zip(weight.chunk(3), biases, strict=True)
    after = _after(module, 'proj_drop', 'gamma1', 'out_drop')
    return Parts(
        q,
        k,
        v,
        _projection(module.proj, 'proj'),
        _num_heads(module, weight.shape[1]),
        _rate(module, 'attn_drop'),
        lambda attn: adapters.FusedAttention(attn, *after),
        probe=lambda x: (x,),
    )


def _pyramid(module: nn.Module) -> Parts | None:
    """Keys from a reduced grid: PVT, and SegFormer as first published."""
    if not _holds(
        module, {'q', 'kv', 'attn_drop', 'proj', 'proj_drop'}, {'sr', 'norm'}
    ):
        return None
    weight, bias = _projection(module.kv, 'kv')
    biases: Iterable[Tensor | None] = [None] * 2
    if bias is not None:
        biases = bias.chunk(2)
    k, v = zip(weight.chunk(2), biases, strict=True)
    q = _projection(module.q, 'q')
    after = _after(module, 'proj_drop')
    reduction, norm, grid = _reduction(module, 'sr', 'norm')
    return Parts(
        q,
        k,
        v,
        _projection(module.proj, 'proj'),
        _num_heads(module, q[0].shape[1]),
        _rate(module, 'attn_drop'),
        lambda attn: adapters.PyramidAttention(
            attn, *after, reduction=reduction, norm=norm
        ),
        probe=lambda x: (x, *grid),
        grid=grid,
        reduced=reduction is not None,
    )


def _vit(module: nn.Module) -> Parts | None:
    """The ViT and SegFormer layers of Hugging Face's transformers."""
    for name in ('attention', 'self'):
        if _holds(module, {name, 'output'}):
            inner = module._modules[name]
            break
    else:
        return None
    output = module.output
    if not _holds(
        inner, {'query', 'key', 'value'}, {'dropout', 'sr', 'layer_norm'}
    ) or not _holds(output, {'dense', 'dropout'}):
        return None
    as_tuple = (
        'output_attentions'
        in inspect.signature(type(module).forward).parameters
    )
    q = _projection(inner.query, 'query')
    after = _after(output, 'dropout')
    if name == 'attention':
        grid = (2, 3)

        def replace(attn: InfSAAttention) -> nn.Module:
            return adapters.VisionAttention(attn, *after, as_tuple=as_tuple)

        def probe(x: Tensor) -> tuple[object, ...]:
            return (x,)
    else:
        reduction, norm, grid = _reduction(inner, 'sr', 'layer_norm')

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
        _projection(inner.key, 'key'),
        _projection(inner.value, 'value'),
        _projection(output.dense, 'dense'),
        _num_heads(inner, q[0].shape[1]),
        # A module in older releases, a number in newer ones.
        _rate(inner, 'dropout') or _rate(inner, 'dropout_prob'),
        replace,
        probe,
        grid,
        reduced='sr' in inner._modules,
    )


def _holds(
    module: nn.Module, needed: set[str], possible: set[str] = frozenset()
) -> bool:
    """Whether a module holds these others and nothing besides."""
    held = {name for name, x in module._modules.items() if x is not None}
    own = (*module._parameters.values(), *module._buffers.values())
    return all(x is None for x in own) and needed <= held <= needed | possible


def _need_only(module: nn.Module, allowed: set[str]) -> None:
    groups = (module._parameters, module._buffers, module._modules)
    for group in groups:
        for name, value in group.items():
            if (
                name not in allowed
                and value is not None
                and not isinstance(value, nn.Identity)
            ):
                raise Refused(f'holds {name!r} of unknown meaning')


def _need_nothing(module: nn.Module, name: str, meaning: str) -> None:
    child = module._modules.get(name)
    if child is not None and not isinstance(child, nn.Identity):
        raise Refused(f'{name} {meaning}')


def _need_plain(module: nn.Module, *names: str) -> None:
    """Refuse parameters that are computed from others."""
    computed = getattr(module, 'parametrizations', {})
    for name in names:
        if name in computed or name not in module._parameters:
            raise Refused(f'its {name} is computed, not a parameter')


def _projection(module: nn.Module, name: str) -> Projection:
    """Weight and bias of a plain linear layer.

    Raises:
        Refused: it is another kind of layer, which may do anything.
    """
    if (
        not isinstance(module, nn.Linear)
        or type(module).forward is not nn.Linear.forward
        or nn.parameter.is_lazy(module.weight)
    ):
        raise Refused(
            f'its projection {name} is a {type(module).__name__}, not a '
            'plain nn.Linear'
        )
    _need_plain(module, 'weight', 'bias')
    return module.weight, module.bias


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says."""
    return 'forward' in vars(module) or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _num_heads(module: nn.Module, width: int) -> int:
    for name in ('num_heads', 'num_attention_heads'):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0:
            break
    else:
        raise Refused('says nowhere how many heads it has')
    scale = getattr(module, 'scale', getattr(module, 'scaling', None))
    usual = math.sqrt(heads / width)
    if isinstance(scale, float) and not math.isclose(
        scale, usual, rel_tol=1e-6
    ):
        raise Refused(
            f'scores are scaled by {scale:.4g}, not by {usual:.4g}, one over '
            'the root of the width of a head'
        )
    return heads


def _rate(module: nn.Module, name: str) -> float:
    drop = getattr(module, name, 0.0)
    return float(getattr(drop, 'p', drop))


def _after(module: nn.Module, *names: str) -> list[nn.Module]:
    children = (module._modules.get(name) for name in names)
    return [child for child in children if child is not None]


def _reduction(
    module: nn.Module, name: str, norm: str
) -> tuple[nn.Module | None, nn.Module | None, tuple[int, int]]:
    """What makes the smaller grid, and a grid that it can reduce."""
    ratio = getattr(module, 'sr_ratio', 1)
    children = module._modules
    return (
        children.get(name),
        children.get(norm),
        (2 * int(ratio), 3 * int(ratio)),
    )


def tokens_for(parts: Parts) -> Tensor:
    """Tokens (1, N, C) under which the attention weights are far from equal.

    Fresh weights are so small that any scores would look alike.
    """
    weight = parts.q[0]
    generator = torch.Generator().manual_seed(0)
    rows, columns = parts.grid
    x = torch.randn(
        1, rows * columns, weight.shape[1], generator=generator
    ).to(weight.device, torch.float32)
    q, k = (x @ pair[0].detach().float().mT for pair in (parts.q, parts.k))
    head = weight.shape[1] // parts.num_heads
    scores = (q * k).unflatten(-1, (-1, head)).sum(-1) / math.sqrt(head)
    spread = float(scores.abs().mean())
    factor = min(max(math.sqrt(2 / max(spread, 1e-12)), 0.1), 1e3)
    return (x * factor).to(weight.dtype)
