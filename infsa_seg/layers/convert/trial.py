# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Whether a layer of another project computes what it seems to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .parts import Parts, Refused


def try_out(module: nn.Module, twin: nn.Module, parts: Parts) -> None:
    """Call a layer and its softmax twin with the same few tokens.

    Args:
        module: the layer.
        twin: the replacement of it whose attention is of variant 'softmax'.
        parts: of the layer.

    Raises:
        Refused: the layer fails, or the outputs differ by more than a few
            roundings.
    """
    assert parts.probe is not None
    tokens = tokens_for(parts)
    arguments = parts.probe(tokens)
    modes = {child: child.training for child in module.modules()}
    try:
        with torch.no_grad():
            theirs = module.eval()(*arguments)
            mine = twin.eval()(*arguments)
    except Exception as error:
        text = (str(error).strip().splitlines() or [''])[0]
        raise Refused(
            'its forward cannot be tried on tokens: '
            f'{type(error).__name__}: {text}'
        ) from error
    finally:
        for child, mode in modes.items():
            child.training = mode
    _compare(mine, theirs)


def _compare(mine: Any, theirs: Any) -> None:
    both = isinstance(mine, tuple) and isinstance(theirs, tuple)
    if both and len(mine) == len(theirs) == 1:
        (mine,), (theirs,) = mine, theirs
    if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
        raise Refused(
            f'its forward answers with a {type(theirs).__name__} of another '
            'kind than known here'
        )
    if mine.shape != theirs.shape:
        raise Refused(
            f'its forward turns {tuple(mine.shape)} into {tuple(theirs.shape)}'
        )
    # A few roundings; accelerators may round products to ten bits.
    exact = 1e-5 if theirs.device.type == 'cpu' else 5e-3
    tolerance = max(exact, 10 * torch.finfo(theirs.dtype).eps)
    # Zeros where the output projection still is zero, as some start.
    size = theirs.abs().max().clamp(min=torch.finfo(theirs.dtype).tiny)
    gap = float((mine - theirs).abs().max() / size)
    if not gap <= tolerance:
        raise Refused(
            'its forward is not softmax attention of its weights, but '
            f'differs by {gap:.1e} of the output'
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
    scores = (q * k).view(*q.shape[:2], -1, head).sum(-1) / math.sqrt(head)
    spread = float(scores.abs().mean())
    factor = min(max(math.sqrt(2 / max(spread, 1e-12)), 0.1), 1e3)
    return (x * factor).to(weight.dtype)
