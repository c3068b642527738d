# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""InfSA in the place of other models' attention."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import InfSAAttention
from .adapters import Adapter
from .parts import Parts, Refused, children, has_hooks
from .refusals import looks_like_attention, why_refused
from .report import ConversionReport, Converted, Note, Skipped
from .sources import take_apart
from .trial import try_out

__all__ = ['ConversionReport', 'Converted', 'Note', 'Skipped', 'convert']

_OURS = (InfSAAttention, Adapter)
# What the layer itself says, or its copy decides.
_RESERVED = (
    *('embed_dims', 'num_heads', 'qkv_bias', 'kdim', 'vdim', 'batch_first'),
)


def convert(
    model: nn.Module,
    variant: str = 'neumann',
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    target_types: type | str | Sequence[type | str] | None = None,
    **options: Any,
) -> ConversionReport:
    """Put InfSA in the place of a model's attention layers.

    Known are ``nn.MultiheadAttention`` (so ``nn.TransformerEncoder`` and
    torchvision's ViT), fused ``qkv`` layers as in timm, DINOv2 and
    mmpretrain, mmcv's ``MultiheadAttention``, the ViT kin of Hugging Face's
    transformers, and the reduced attention of SegFormer and PVT. The weights
    of the projections are copied bit for bit, with dtype, device, training
    mode and ``requires_grad``; parameters that InfSA adds start afresh. The
    model is changed in place, and needs training afterwards, since another
    attention computes something else. Make the optimizer after that.

    Every layer of a foreign class is tried on a few random tokens first: one
    whose own forward is not softmax attention of its weights is skipped.

    Args:
        model: any model that holds attention layers.
        variant: see :class:`infsa_seg.layers.InfSAAttention`.
        include: patterns (as in a shell; ``*`` matches dots too) of names
            of layers, such as ``'blocks.*'``; others stay. None is all.
        exclude: patterns of layers that stay, with all that they hold.
        target_types: classes, or names of classes, to which a layer must
            belong. None is all.
        **options: of the variant, such as ``hops='inf'``.

    Returns:
        What was converted and what was skipped, with reasons. Grouped-query,
        causal, cross-attention, latent, rotary and relative-bias attention
        are skipped by name.

    Raises:
        ValueError: nothing was converted; or an argument is wrong. The model
            is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f'model is a {type(model).__name__}, not a module')
    _check_options(variant, options)
    chosen = _Choice(model, include, exclude, target_types)
    report = ConversionReport()
    shared = _shared_parameters(model)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module, parent in chosen.layers():
        reason = why_refused(module, parent)
        try:
            if reason is not None:
                raise Refused(reason)
            parts = take_apart(module)
            if parts is None:
                report.skipped.append(Skipped(name, _type(module), _UNKNOWN))
                continue
            if parent is None:
                raise ValueError(
                    'the model is itself an attention layer, which cannot be '
                    'replaced in place; give a module that holds it'
                )
            _check(module, parts, options, shared)
            replacements[module] = _replace(module, parts, variant, options)
        except Refused as refusal:
            report.skipped.append(Skipped(name, _type(module), str(refusal)))
        else:
            report.converted.append(Converted(name, _type(module), variant))
            if parts.dropout:
                text = f'dropout {parts.dropout:g} of the weights is left out'
                report.notes.append(Note(name, text))
        chosen.settle(name)
    report.skipped[:] = _without_containers(report)
    if not report.converted:
        raise ValueError(f'nothing was converted: {_why_nothing(report)}')
    _put_in_place(model, replacements)
    report.notes.extend(_close_fast_paths(model))
    return report


_UNKNOWN = 'not a kind that is known here'


def _type(module: nn.Module) -> str:
    return type(module).__name__


class _Choice:
    """The layers of a model that the caller means."""

    def __init__(
        self,
        model: nn.Module,
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
        target_types: type | str | Sequence[type | str] | None,
    ) -> None:
        self.modules = dict(model.named_modules())
        self.include = _patterns('include', include, self.modules)
        self.exclude = _patterns('exclude', exclude, self.modules)
        if isinstance(target_types, type | str):
            target_types = [target_types]
        elif not isinstance(target_types, Iterable | None):
            raise ValueError(f'target_types is {target_types!r}, not classes')
        for item in target_types or ():
            if not isinstance(item, type | str):
                raise ValueError(
                    f'target_types has {item!r}, which is neither a class '
                    'nor the name of one'
                )
        self.types = None if target_types is None else list(target_types)
        self.settled: list[str] = []

    def settle(self, name: str) -> None:
        """Look no more at what a layer holds."""
        self.settled.append(f'{name}.' if name else name)

    def layers(self) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
        """Names, layers and the modules that hold them, outer ones first."""
        for name, module in self.modules.items():
            if name.startswith(tuple(self.settled)):
                continue
            if isinstance(module, _OURS) or _matches(name, self.exclude or ()):
                self.settle(name)
            elif (
                (looks_like_attention(module) or self._is_named(module))
                and (self.include is None or _matches(name, self.include))
                and (self.types is None or self._has_type(module))
            ):
                parent = self.modules.get(name.rpartition('.')[0])
                yield name, module, parent if name else None

    def _has_type(self, module: nn.Module) -> bool:
        # Of transformers' layers the inner half has the better known name.
        halves = [module, *children(module, 'attention', 'self')]
        return any(self._is_named(half) for half in halves)

    def _is_named(self, module: nn.Module) -> bool:
        return any(
            item in (base, base.__name__)
            for item in self.types or ()
            for base in type(module).__mro__
        )


def _patterns(
    argument: str,
    patterns: str | Sequence[str] | None,
    modules: dict[str, nn.Module],
) -> list[str] | None:
    if patterns is None:
        return None
    if not isinstance(patterns, Iterable):
        raise ValueError(f'{argument} is {patterns!r}, not a pattern')
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f'{argument} has {pattern!r}, not a pattern')
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(
                f'{argument}={pattern!r} matches no module of the model; '
                f'there are {_some(list(modules)[1:])}'
            )
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_options(variant: str, options: dict[str, Any]) -> None:
    for name in _RESERVED:
        if name in options:
            raise ValueError(f'{name} is taken from the layer; leave it out')
    try:
        with torch.device('meta'):
            InfSAAttention(2, 1, variant=variant, **copy.deepcopy(options))
    except TypeError as error:
        raise ValueError(
            f'attention of variant {variant!r} takes other options than '
            f'{sorted(options)}: {error}'
        ) from error


def _check(
    module: nn.Module,
    parts: Parts,
    options: dict[str, Any],
    shared: set[int],
) -> None:
    """Refuse what a copy would lose."""
    if any(has_hooks(child) for child in module.modules()):
        raise Refused('has hooks, which would be lost; remove them first')
    if any(id(x) in shared for x in module.parameters()):
        raise Refused('shares weights with another layer')
    if parts.reduced and options.get('hops', 1) != 1:
        raise Refused(
            'keys come from a smaller grid, and several hops need as many '
            'queries as keys'
        )
    if parts.probe is not None and not parts.q[0].is_meta:
        try_out(module, _replace(module, parts, 'softmax', {}), parts)


def _replace(
    module: nn.Module, parts: Parts, variant: str, options: dict[str, Any]
) -> nn.Module:
    """A replacement that holds copies of the layer's weights."""
    weight = parts.q[0]
    qkv = (parts.q, parts.k, parts.v)
    layer = InfSAAttention(
        weight.shape[1],
        parts.num_heads,
        variant=variant,
        qkv_bias=any(bias is not None for _, bias in qkv),
        kdim=parts.k[0].shape[1],
        vdim=parts.v[0].shape[1],
        batch_first=parts.batch_first,
        **copy.deepcopy(options),
    ).to(weight.device, weight.dtype)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    for mine, theirs in zip(projections, (*qkv, parts.out), strict=True):
        _copy(mine.weight, theirs[0])
        if mine.bias is not None:
            _copy(mine.bias, theirs[1])
    layer.train(module.training)
    result = parts.replace(layer)
    if isinstance(result, Adapter):
        # What follows is the layer's own, in the mode that it has.
        result.training = result.after.training = module.training
    return result


def _copy(mine: Tensor, theirs: Tensor | None) -> None:
    """Copy bit for bit; a bias that is not there stays zero for good."""
    with torch.no_grad():
        if theirs is None:
            mine.zero_()
        else:
            mine.copy_(theirs)
    mine.requires_grad = theirs is not None and theirs.requires_grad


def _shared_parameters(model: nn.Module) -> set[int]:
    """Those that more modules than one hold."""
    counts = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return {key for key, count in counts.items() if count > 1}


def _put_in_place(
    model: nn.Module, replacements: dict[nn.Module, nn.Module]
) -> None:
    """Wherever a layer is held: one may stand at several places."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replacements:
                module._modules[name] = replacements[child]


def _close_fast_paths(model: nn.Module) -> Iterator[Note]:
    """Nested tensors would be given to layers that do not know them.

    The fused path of nn.TransformerEncoderLayer is closed by the attention,
    which tells it that it has no packed projection.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoder)
            and any(isinstance(child, _OURS) for child in module.modules())
            and module.use_nested_tensor
        ):
            module.enable_nested_tensor = False
            module.use_nested_tensor = False
            text = 'nested tensors of nn.TransformerEncoder are off'
            yield Note(name or '(the model)', text)


def _without_containers(report: ConversionReport) -> list[Skipped]:
    """Without modules named like attention that only hold some."""
    found = [row.name for row in report.converted]
    found += [row.name for row in report.skipped]
    return [
        row
        for row in report.skipped
        if row.reason != _UNKNOWN
        or not any(name.startswith(f'{row.name}.') for name in found)
    ]


def _why_nothing(report: ConversionReport) -> str:
    if not report.skipped:
        return 'no attention layer was found among the chosen modules'
    reasons = dict.fromkeys(
        f'{row.type} ({row.reason})' for row in report.skipped
    )
    return 'found ' + _some(list(reasons))


def _some(items: Sequence[str], most: int = 5) -> str:
    more = f' and {len(items) - most} more' if len(items) > most else ''
    return ', '.join(items[:most]) + more
