# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""An attention layer taken apart, and how parts are told from others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from torch import Tensor, nn

from ..attention import InfSAAttention

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
            need_matrix(weight)
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


def holds(
    module: nn.Module,
    needed: set[str],
    possible: AbstractSet[str] = frozenset(),
) -> bool:
    """Whether a module holds these others and nothing besides."""
    held = {name for name, x in module._modules.items() if x is not None}
    own = (*module._parameters.values(), *module._buffers.values())
    return all(x is None for x in own) and needed <= held <= needed | possible


def need_only(module: nn.Module, allowed: set[str]) -> None:
    """Refuse a layer that holds anything under another name."""
    groups = (module._parameters, module._buffers, module._modules)
    for group in groups:
        for name, value in group.items():
            if (
                name not in allowed
                and value is not None
                and not isinstance(value, nn.Identity)
            ):
                raise Refused(f'holds {name!r} of unknown meaning')


def need_absent(module: nn.Module, name: str, meaning: str) -> None:
    """Refuse a layer with a module that does something."""
    child = module._modules.get(name)
    if child is not None and not isinstance(child, nn.Identity):
        raise Refused(f'{name} {meaning}')


def need_plain(module: nn.Module, *names: str) -> None:
    """Refuse parameters that are computed from others."""
    computed = getattr(module, 'parametrizations', {})
    for name in names:
        if name in computed or name not in module._parameters:
            raise Refused(f'its {name} is computed, not a parameter')


def projection(module: nn.Module, name: str) -> Projection:
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
    need_plain(module, 'weight', 'bias')
    need_matrix(module.weight)
    return module.weight, module.bias


def need_matrix(weight: Tensor) -> None:
    """Refuse a weight of which this process holds a part or nothing."""
    if weight.dim() != 2:
        raise Refused(
            f'a weight has the shape {tuple(weight.shape)}; gather what is '
            'spread over processes first'
        )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says."""
    return 'forward' in vars(module) or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def count_heads(module: nn.Module, width: int) -> int:
    """The heads of a layer whose scores are scaled as usual."""
    for name in ('num_heads', 'num_attention_heads', 'heads', 'n_heads'):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0:
            break
    else:
        raise Refused('says nowhere how many heads it has')
    scale = getattr(module, 'scale', getattr(module, 'scaling', None))
    usual = math.sqrt(heads / width)
    # Some multiply, some divide.
    if isinstance(scale, float) and not any(
        math.isclose(scale, known, rel_tol=1e-6)
        for known in (usual, 1 / usual)
    ):
        raise Refused(
            f'scores are scaled by {scale:.4g}, not by {usual:.4g}, one over '
            'the root of the width of a head'
        )
    return heads


def drop_rate(module: nn.Module, name: str) -> float:
    """Of a dropout that is a module, or a number, or not there."""
    drop = getattr(module, name, 0.0)
    return float(getattr(drop, 'p', drop))


def children(module: nn.Module, *names: str) -> list[nn.Module]:
    """Those of the named modules that a layer has."""
    found = (module._modules.get(name) for name in names)
    return [child for child in found if child is not None]


def find_reduction(
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
