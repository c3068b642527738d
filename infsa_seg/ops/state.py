# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The mergeable state: sums over tokens, of a size that knows no N.

A global operation needs the whole image only through a :class:`State`. Bands
of rows, chunks of a sequence and ranks of a group each make their own, and
``merge`` adds them, in any order. A :class:`Context` is what the finished
sums are turned into; with it every token can be answered by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

StateT = TypeVar('StateT', bound='State')


def merge_all(states: Iterable[StateT]) -> StateT:
    """Merge one or more states."""
    return functools.reduce(lambda a, b: a.merge(b), states)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tokens of ``dtype`` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class _AllReduce(torch.autograd.Function):
    """Sum over the ranks, forward and backward.

    The backward sums too: each rank holds a part of the loss, and the state
    that came in here has an effect on all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: ProcessGroup | None,
        on_call: Callable[[Tensor], None],
    ) -> Tensor:
        ctx.group, ctx.on_call = group, on_call
        result = tensor.clone()
        on_call(result)
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone()
        ctx.on_call(grad)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None, None


@dataclasses.dataclass
class State:
    """Base of all states: a dataclass whose fields are raw sums over tokens.

    Every field is a tensor with the batch as its first dimension, or None
    where the operation does not need that sum. Zeros are the identity of
    ``merge``. Nothing is divided here and no epsilon is added: that would make
    the result depend on the number of parts.
    """

    def _fields(self) -> dict[str, Tensor]:
        values = vars(self)
        return {k: v for k, v in values.items() if v is not None}

    def merge(self: StateT, other: StateT) -> StateT:
        """Return the state of both parts together; neither is changed."""
        mine, theirs = self._fields(), other._fields()
        if mine.keys() != theirs.keys():
            raise ValueError(
                f'{type(self).__name__}: one part has the sums '
                f'{sorted(mine)}, the other {sorted(theirs)}'
            )
        return dataclasses.replace(
            self, **{name: mine[name] + theirs[name] for name in mine}
        )

    def all_reduce(
        self: StateT,
        group: ProcessGroup | None = None,
        on_call: Callable[[Tensor], None] = lambda buffer: None,
    ) -> StateT:
        """Merge the states of all ranks of ``group`` by one collective.

        Differentiable. All fields travel in one buffer of the widest dtype.
        Without an initialised process group this is the identity.

        Args:
            group: the ranks; None for all.
            on_call: is shown each buffer before it travels, that of the
                gradients too.
        """
        if not (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
        ):
            return self
        mine = self._fields()
        dtype = sum_dtype(torch.float32)
        for tensor in mine.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        buffer = torch.cat([t.to(dtype).flatten() for t in mine.values()])
        buffer = _AllReduce.apply(buffer, group, on_call)  # type: ignore[no-untyped-call]
        pieces = buffer.split([t.numel() for t in mine.values()])
        return dataclasses.replace(
            self,
            **{
                name: piece.view_as(tensor).to(tensor.dtype)
                for (name, tensor), piece in zip(
                    mine.items(), pieces, strict=True
                )
            },
        )

    def to(self: StateT, *args: Any, **kwargs: Any) -> StateT:
        """Move or cast every sum, with the arguments of ``Tensor.to``."""
        return dataclasses.replace(
            self,
            **{k: v.to(*args, **kwargs) for k, v in self._fields().items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all sums together; independent of the number of tokens."""
        return sum(
            t.numel() * t.element_size() for t in self._fields().values()
        )


@dataclasses.dataclass
class CountState(State):
    """The number of valid tokens of each image.

    Attributes:
        count: (B,), float32 or better.
    """

    count: Tensor


@dataclasses.dataclass
class Context:
    """What is known of the whole image before tokens are answered.

    Operations add to it by subclassing.

    Attributes:
        num_tokens: (B,) valid tokens of each whole image, or None where the
            operation does not ask for it.
    """

    num_tokens: Tensor | None = None
