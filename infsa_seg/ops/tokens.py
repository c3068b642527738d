# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Small things that every form does to tokens before it sums them."""

from __future__ import annotations

import torch
from torch import Tensor

from .state import sum_dtype

# The paper's epsilon: added once, to a finished normaliser.
EPS = 1e-6
# One matrix product over 331,776 tokens was off by 2e-4 in float32, as its
# running sums outgrow their terms; over pieces of this size, by 2e-7.
_PIECE = 1024
# Torch has it from 2.7 on.
_is_exporting = getattr(torch.compiler, 'is_exporting', lambda: False)


def hide(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zero the rows of invalid tokens.

    Args:
        x: (B, H, N, ...) or, shared by the heads, (B, N, ...).
        valid: (B, N) bool, or None for all.
    """
    if valid is None:
        return x
    if x.dim() == 4:
        valid = valid[:, None]
    return x.masked_fill(~valid[..., None], 0)


def sum_products(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b``, a sum over tokens that stays accurate however many there are.

    Not so in an exported program, which sums in one piece: it is good for
    some ten thousand tokens.

    Args:
        a: (..., N, M).
        b: (..., N, D).

    Returns:
        (..., M, D).
    """
    if _is_exporting():
        # The pieces would tie the program to one number of tokens.
        return a.mT @ b
    pieces = a.shape[-2] // _PIECE
    whole = pieces * _PIECE
    rest = a[..., whole:, :].mT @ b[..., whole:, :]
    a, b = (
        x[..., :whole, :].reshape(*x.shape[:-2], pieces, _PIECE, x.shape[-1])
        for x in (a, b)
    )
    return (a.mT @ b).sum(-3) + rest


def count_tokens(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Valid tokens per image, (B,), in the dtype of the sums of ``x``.

    Args:
        x: (B, ..., N, C).
        valid: (B, N) bool, or None for all.
    """
    if valid is not None:
        return valid.sum(-1).to(sum_dtype(x.dtype))
    return x.new_full((x.shape[0],), x.shape[-2], dtype=sum_dtype(x.dtype))


def as_discount(discount: Tensor | float, like: Tensor) -> Tensor:
    """The discount as a tensor that multiplies (B, H, N, D) head by head.

    Args:
        discount: in (0, 1); a number, a scalar tensor or one per head (H,).
        like: gives dtype and device.
    """
    value = torch.as_tensor(discount, dtype=like.dtype, device=like.device)
    return value.reshape(-1, 1, 1)


def chunk_tokens(
    num_chunks: int, *tensors: Tensor, valid: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Cut (B, H, N, D) tensors and their mask along N, side by side.

    Returns:
        Per chunk, the piece of each tensor and of ``valid`` (or None).
    """
    pieces = [t.tensor_split(num_chunks, -2) for t in tensors]
    if valid is None:
        masks: tuple[Tensor | None, ...] = (None,) * num_chunks
    else:
        masks = valid.tensor_split(num_chunks, -1)
    return list(zip(*pieces, masks, strict=True))
