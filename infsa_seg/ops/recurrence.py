# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The auxiliary state of each key: its own discounted self-loop (DESIGN 3.4).

From u = 0, each token repeats ``u <- alpha (left . u) right + k``, where with
``unit = k / (|k| + eps)``

* normalize='both': left = right = unit, the fixed point is k / (1 - alpha);
* normalize='once': left = unit, right = k, the fixed point is
  k / (1 - alpha |k|), which exists only below alpha |k| = 1

(both up to eps). u stays parallel to k, so T steps are one geometric sum of
the ratio ``alpha (left . right)``: :func:`key_recurrence` in O(log T), against
:func:`iterate_keys` as written. Tokens never mix, so any chunk of them, with
its own state, is a problem by itself. Shapes: B batch, H heads, N tokens, D
width per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .state import sum_dtype
from .tokens import EPS, as_discount

# Where 'clamp' starts to act, and what the ratio then stays below.
FREE_RATIO = 0.9
MAX_RATIO = 0.99


def iterate_keys(
    k: Tensor,
    alpha: Tensor | float,
    steps: int,
    normalize: str = 'both',
    state: Tensor | None = None,
) -> Tensor:
    """The recurrence as written, step by step.

    Args:
        k, alpha, normalize, state: as for :func:`key_recurrence`.
        steps: how many, from 0.

    Returns:
        u after those steps, (B, H, N, D), as :func:`key_recurrence` does.
    """
    k, u, dtype = _prepare(k, state)
    left, right = _self_loop(k, normalize)
    discount = as_discount(alpha, k)
    for _ in range(steps):
        u = discount * (left * u).sum(-1, keepdim=True) * right + k
    return u.to(dtype)


def key_recurrence(
    k: Tensor,
    alpha: Tensor | float,
    steps: float = math.inf,
    normalize: str = 'both',
    on_divergence: str = 'error',
    state: Tensor | None = None,
) -> Tensor:
    """The recurrence in closed form, over any chunk of tokens.

    Args:
        k: (B, H, N, D) keys.
        alpha: at least 0; a number, a scalar tensor or one per head (H,).
        steps: T, a positive integer or ``math.inf``.
        normalize: 'both' or 'once'.
        on_divergence: 'error' refuses what has no finite result; it looks at
            the numbers, so a compiled graph breaks there. 'clamp' lowers the
            discount of the tokens concerned, whatever T: a ratio r up to 0.9
            is left alone, and beyond it rises ever more slowly towards 0.99,
            ``0.99 - 0.09 / (1 + x)`` with ``x = (r - 0.9) / 0.09``. It is
            once differentiable there and never flat, so alpha still learns; a
            key grows 100-fold at most, and stays inside the dtype.
        state: u to go on from, (B, H, N, D), as an earlier call returned it;
            None starts from zero.

    Returns:
        u after T more steps, (B, H, N, D), computed in float32 or better, in
        the dtype of ``state`` or else of ``k``. A stream of half-precision
        keys that starts from zeros in float32 is rounded nowhere between.

    Raises:
        ValueError: for an unknown option, or with on_divergence='error' where
            the fixed point does not exist or the result overflows.
    """
    if not steps >= 1 or (math.isfinite(steps) and steps != int(steps)):
        raise ValueError(f'steps={steps} is no positive integer or inf')
    if on_divergence not in ('error', 'clamp'):
        raise ValueError(
            f"on_divergence={on_divergence!r} is unknown; use 'error' or "
            "'clamp'"
        )
    k, start, dtype = _prepare(k, state)
    left, right = _self_loop(k, normalize)
    loop = (left * right).sum(-1, keepdim=True)
    discount = as_discount(alpha, k)
    if on_divergence == 'clamp':
        discount = discount * _damping(discount * loop)
    ratio = discount * loop
    if math.isinf(steps):
        if on_divergence == 'error':
            _refuse_divergence(ratio, normalize)
        u = k / (1 - ratio)
    else:
        u = _geometric_sum(ratio, int(steps)) * k
        if state is not None:
            pull = discount * (left * start).sum(-1, keepdim=True) * right
            u = u + ratio ** (int(steps) - 1) * pull
    if on_divergence == 'clamp':
        largest = torch.finfo(dtype).max
        return u.clamp(-largest, largest).to(dtype)
    u = u.to(dtype)
    _refuse_overflow(u, steps)
    return u


def _prepare(
    k: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Keys and first state to compute with, and the dtype of the result."""
    result = k.dtype if state is None else state.dtype
    dtype = sum_dtype(torch.promote_types(k.dtype, result))
    k = k.to(dtype)
    start = torch.zeros_like(k) if state is None else state.to(dtype)
    return k, start, result


def _self_loop(k: Tensor, normalize: str) -> tuple[Tensor, Tensor]:
    """The vectors left and right of a step, (B, H, N, D) each."""
    unit = k / (torch.linalg.vector_norm(k, dim=-1, keepdim=True) + EPS)
    if normalize == 'both':
        return unit, unit
    if normalize == 'once':
        return unit, k
    raise ValueError(
        f"normalize={normalize!r} is unknown; use 'both' or 'once'"
    )


def _geometric_sum(ratio: Tensor, terms: int) -> Tensor:
    """``sum_{t<terms} ratio^t`` by doubling.

    The quotient (1 - r^T) / (1 - r) is 0 / 0 at one and cancels near it; this
    adds positive numbers only, and its gradient is as good.
    """
    total, power = torch.ones_like(ratio), ratio
    for bit in f'{terms:b}'[1:]:
        total, power = total * (1 + power), power * power
        if bit == '1':
            total, power = 1 + ratio * total, ratio * power
    return total


def _damping(ratio: Tensor) -> Tensor:
    """What 'clamp' multiplies a discount by; one up to the free ratio."""
    room = MAX_RATIO - FREE_RATIO
    wanted = ratio.clamp_min(FREE_RATIO)
    excess = (wanted - FREE_RATIO) / room
    return (FREE_RATIO + room * excess / (1 + excess)) / wanted


def _refuse_divergence(ratio: Tensor, normalize: str) -> None:
    if (ratio >= 1).any():
        limited = 'alpha' if normalize == 'both' else 'alpha * |k|'
        raise ValueError(
            f'{limited} reaches {ratio.max().item():.4g}, and '
            f'normalize={normalize!r} has a fixed point only below 1: lower '
            'alpha, shorten the keys, give a number of steps, or use '
            "on_divergence='clamp'"
        )


def _refuse_overflow(u: Tensor, steps: float) -> None:
    if not u.isfinite().all():
        raise ValueError(
            f'the keys after steps={steps} are beyond {u.dtype}: lower alpha '
            "or the steps, shorten the keys, or use on_divergence='clamp'"
        )
