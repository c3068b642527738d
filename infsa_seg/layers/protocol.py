# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The two kinds of operation, and all that an executor knows of a layer.

A *band* is a strip of token rows, (B, rows, columns, C). A :class:`LocalOp`
makes a row from a few rows around it; a :class:`GlobalOp` needs the whole
image, but only through a state that bands add up (DESIGN section 2). Layers
know no executor: what lies outside a band reaches them through two callables,

* ``merge(state) -> state`` completes a state over the parts that someone else
  holds (other ranks); :func:`identity` where nobody does;
* ``halo(x, n) -> above, below`` gives up to ``n`` rows on each side of the
  band, fewer at the border of the image; :func:`zero_rows` gives none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from infsa_seg.ops import Context, CountState, count_tokens

Merge = Callable[[Any], Any]
Halo = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def identity(state: Any) -> Any:
    """The merge of a whole image: nobody else holds a part."""
    return state


def zero_rows(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The halo of a whole image: zero rows lie beyond it."""
    return x[:, :0], x[:, :0]


@runtime_checkable
class LocalOp(Protocol):
    """An operation whose output row depends on ``halo`` rows each side."""

    halo: int

    def __call__(
        self, x: Tensor, *, halo: Halo = ..., valid: Tensor | None = ...
    ) -> Tensor:
        """Return the band's output, (B, rows, columns, C).

        Args:
            x: the band, (B, rows, columns, C).
            halo: gives the rows around it.
            valid: bool mask of the band together with the rows that
                ``halo`` gives, (B, rows, columns); None for all. Invalid
                tokens have no influence on valid ones.
        """
        ...


@runtime_checkable
class GlobalOp(Protocol):
    """An operation that sees the image through ``num_phases`` states.

    Each phase is complete before the next starts: for every phase, all bands
    are accumulated, the state is merged and finalised; then any band can be
    attended to, in any order.
    """

    num_phases: int

    def init_state(self, batch: int, phase: int, device: torch.device) -> Any:
        """Return the zero state, in float32."""
        ...

    def accumulate(
        self,
        x: Tensor,
        state: Any,
        phase: int,
        context: Context,
        valid: Tensor | None = None,
    ) -> Any:
        """Add a band (B, ..., C) with mask (B, ...) to ``state``.

        Args:
            x: the band.
            state: what the phase has summed up so far.
            phase: 0 ... num_phases - 1.
            context: what :meth:`finalize` made of the phases before, or the
                bare :class:`Context` with the image's number of tokens.
            valid: True where a token counts; None for all.
        """
        ...

    def finalize(self, state: Any, phase: int, context: Context) -> Context:
        """Turn a complete state into the next context, in O(1) of N."""
        ...

    def attend(self, x: Tensor, context: Context) -> Tensor:
        """Answer a band, (B, ..., C) to (B, ..., C)."""
        ...

    def __call__(
        self,
        x: Tensor,
        *,
        merge: Merge = ...,
        valid: Tensor | None = ...,
        context: Context | None = ...,
    ) -> Tensor:
        """Run all phases over one band and answer it, as by the verbs."""
        ...


@dataclasses.dataclass(frozen=True)
class Tap:
    """A place in a network from which the decoder is fed.

    Attributes:
        project: what the tokens there, (B, ..., C), contribute, (B, ..., W).
            The contributions of all taps are summed, so that no tap has to be
            kept.
    """

    project: Callable[[Tensor], Tensor]


Step = GlobalOp | LocalOp | Tap


class TokenNetwork(Protocol):
    """A network over the tokens of an image, as an executor sees it.

    Attributes:
        patch_size: side of a token in pixels.
        embed_dims: channels C of a token.
        num_classes: channels of the logits.
    """

    patch_size: int
    embed_dims: int
    num_classes: int

    def embed(
        self, pixels: Tensor, first: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """Turn a part of an image into tokens, (B, rows, columns, C).

        Args:
            pixels: (B, channels, height, width), normalised.
            first: token row and column of the image at which it starts.
            size: token rows and columns of the image.
        """
        ...

    def steps(self) -> Iterator[Step]:
        """What happens to the tokens, in order."""
        ...


@runtime_checkable
class BandNetwork(TokenNetwork, Protocol):
    """A network from pixels to logits for every place.

    Attributes:
        tap_dims: channels W of what a tap contributes.
        stride: side in pixels of one place of the logits, which may be a
            fraction.
        halo: tokens on each side that :meth:`decode` needs.
    """

    tap_dims: int
    stride: Fraction
    halo: int

    def decode(self, taps: Tensor, valid: Tensor | None = None) -> Tensor:
        """Turn summed taps into logits.

        Args:
            taps: (B, rows, columns, W), a part with its halo.
            valid: (B, rows, columns) bool; None for all. Invalid tokens have
                no influence on the logits of others.

        Returns:
            (B, classes, height, width) in steps of ``stride``.
        """
        ...


@runtime_checkable
class PooledNetwork(TokenNetwork, Protocol):
    """A network from pixels to logits for the image as a whole.

    The last of its steps is a :class:`GlobalOp` that no token has to be
    answered by: its context is what the image is classified by.
    """

    def classify(self, context: Context) -> Tensor:
        """Turn the context of the last step into logits, (B, classes)."""
        ...


Network = BandNetwork | PooledNetwork


def run_global(
    op: GlobalOp,
    bands: list[Tensor],
    merge: Merge = identity,
    valid: list[Tensor | None] | None = None,
    context: Context | None = None,
) -> list[Tensor]:
    """Apply a global operation to bands that are all at hand.

    Args:
        op: the operation.
        bands: (B, ..., C) each; together with what ``merge`` adds, the image.
        merge: completes each state.
        valid: a mask (B, ...) or None per band.
        context: holds the number of valid tokens; None counts them here.

    Returns:
        The output of each band.
    """
    masks: list[Tensor | None] = [None] * len(bands)
    if valid is not None:
        masks = valid
    if context is None:
        context = count_context(bands, merge, masks)
    batch, device = bands[0].shape[0], bands[0].device
    for phase in range(op.num_phases):
        state = op.init_state(batch, phase, device)
        for band, mask in zip(bands, masks, strict=True):
            state = op.accumulate(band, state, phase, context, mask)
        context = op.finalize(merge(state), phase, context)
    return [op.attend(band, context) for band in bands]


def count_context(
    bands: list[Tensor], merge: Merge, masks: list[Tensor | None]
) -> Context:
    """Count the valid tokens of the whole image."""
    total: CountState | None = None
    for band, mask in zip(bands, masks, strict=True):
        count = CountState(
            count_tokens(
                band.flatten(1, -2), None if mask is None else mask.flatten(1)
            )
        )
        total = count if total is None else total.merge(count)
    return Context(num_tokens=merge(total).count)
