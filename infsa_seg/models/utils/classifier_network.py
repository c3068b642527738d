# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A classifier as the list of steps that an executor runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from infsa_seg.layers.protocol import Merge, Step, identity, run_global
from infsa_seg.ops import Context, State, sum_dtype

from .network import check_backbone


@dataclasses.dataclass
class PoolState(State):
    """A sum over tokens.

    Attributes:
        total: (B, C).
    """

    total: Tensor


@dataclasses.dataclass
class PoolContext(Context):
    """The mean over the valid tokens of the image.

    Attributes:
        mean: (B, C), float32 or better.
    """

    mean: Tensor | None = None


class MeanPool:
    """A mean over tokens as a :class:`infsa_seg.layers.protocol.GlobalOp`.

    Args:
        project: what of the tokens is averaged, (B, ..., C) to (B, ..., D).
        dims: D.
    """

    num_phases = 1

    def __init__(self, project: Callable[[Tensor], Tensor], dims: int) -> None:
        self.project, self.dims = project, dims

    def init_state(
        self, batch: int, phase: int, device: torch.device
    ) -> PoolState:
        """See the protocol."""
        return PoolState(torch.zeros(batch, self.dims, device=device))

    def accumulate(
        self,
        x: Tensor,
        state: PoolState,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> PoolState:
        """See the protocol."""
        x = self.project(x)
        x = x.to(sum_dtype(x.dtype))
        if valid is not None:
            x = x.where(valid[..., None], x.new_zeros(()))
        return PoolState(state.total + x.flatten(1, -2).sum(1))

    def finalize(
        self, state: PoolState, phase: int, context: Context
    ) -> PoolContext:
        """See the protocol."""
        count = context.num_tokens
        assert count is not None
        mean = state.total / count[:, None].to(state.total)
        return PoolContext(count, mean)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        """The mean, for each token, (B, ..., D)."""
        assert isinstance(context, PoolContext) and context.mean is not None
        mean = context.mean.to(x.dtype)
        gaps = [1] * (x.ndim - 2)
        return mean.view(len(mean), *gaps, -1).expand(*x.shape[:-1], -1)

    def __call__(
        self,
        x: Tensor,
        *,
        merge: Merge = identity,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """See the protocol."""
        return run_global(self, [x], merge, [valid], context)[0]


class ClassifierNetwork:
    """The :class:`infsa_seg.layers.protocol.PooledNetwork` of a classifier.

    Args:
        classifier (nn.Module): An ``InfViTClassifier`` of an ``InfViT`` with
            an attention of sums.

    Raises:
        ValueError: A part is neither local nor global, so that bands cannot
            give the result of the whole image; it is named.
    """

    def __init__(self, classifier: Any) -> None:
        self.backbone = classifier.backbone
        check_backbone(self.backbone)
        if classifier.pool != 'mean':
            raise ValueError(
                f'pool={classifier.pool!r}: the class token is no part of '
                "the image and cannot run in bands; use pool='mean'"
            )
        self.norm, self.head = classifier.norm, classifier.head
        self.patch_size: int = self.backbone.patch_size
        self.embed_dims: int = self.backbone.embed_dims
        self.num_classes: int = classifier.num_classes

    def embed(
        self, pixels: Tensor, first: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """See the protocol."""
        return self.backbone.embed(pixels, first, size)

    def steps(self) -> Iterator[Step]:
        """See the protocol."""
        yield from self.backbone.steps()
        yield MeanPool(self._normalise, self.embed_dims)

    def classify(self, context: Context) -> Tensor:
        """See the protocol."""
        assert isinstance(context, PoolContext) and context.mean is not None
        logits = self.head(context.mean.to(self.head.weight.dtype))
        return logits.to(sum_dtype(logits.dtype))

    def _normalise(self, x: Tensor) -> Tensor:
        last = len(self.backbone.layers) - 1
        return self.norm(self.backbone.tap(last, x))
