# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Token graphs as products of two thin factors (DESIGN 3.3).

S = phi_q phi_k^T with factors (B, H, N, M), in float32 or better whatever the
activations: the exponent alone would be off by up to 0.1 in bfloat16. All
factors but those of :func:`signed` are non-negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .state import sum_dtype

# Bounds of the landmark temperature, as learnt and after the log-N rule.
MAX_LEARNT_TEMPERATURE = 30.0
MAX_TEMPERATURE = 60.0
# Puts exp(tau cos - shift) between 4e-31 and 5e21 in the worst case, so that
# neither a far landmark underflows nor a sum over 1e9 tokens overflows.
KEY_SHIFT = 10.0


def landmark_temperature(
    log_temperature: Tensor,
    num_tokens: Tensor | None = None,
    num_tokens_ref: Tensor | None = None,
) -> Tensor:
    """The sharpness of a landmark graph, grown with the log of its extent.

    A softmax over ever more tokens goes flat; multiplying by
    ``log N / log N_ref`` keeps it as sharp as it was in training.

    Args:
        log_temperature: (H,), learnt; bounded by log 30.
        num_tokens: (B,) valid tokens of each whole image; None switches the
            log-N rule off.
        num_tokens_ref: scalar, tokens per image in training.

    Returns:
        (B or 1, H, 1, 1), at most 60, in float32 or better.
    """
    dtype = sum_dtype(log_temperature.dtype)
    learnt = log_temperature.to(dtype).clamp_max(
        math.log(MAX_LEARNT_TEMPERATURE)
    )
    tau = learnt.exp().view(1, -1, 1, 1)
    if num_tokens is not None:
        assert num_tokens_ref is not None
        # With one token, or none, any temperature gives the same graph.
        extent = num_tokens.to(dtype).clamp_min(2).log()
        ratio = extent / num_tokens_ref.to(dtype).clamp_min(2).log()
        tau = (tau * ratio.view(-1, 1, 1, 1)).clamp_max(MAX_TEMPERATURE)
    return tau


def _cosines(x: Tensor, landmarks: Tensor) -> Tensor:
    dtype = sum_dtype(x.dtype)
    unit = F.normalize(landmarks.to(dtype), dim=-1)
    return F.normalize(x.to(dtype), dim=-1) @ unit.mT


def landmark_queries(
    q: Tensor, landmarks: Tensor, temperature: Tensor
) -> Tensor:
    """Where each token walks: softmax over the landmarks, (B, H, N, M).

    Args:
        q: (B, H, N, D); only the direction counts.
        landmarks: (H, M, D); only the direction counts.
        temperature: of :func:`landmark_temperature`.
    """
    return (temperature * _cosines(q, landmarks)).softmax(-1)


def landmark_keys(k: Tensor, landmarks: Tensor, temperature: Tensor) -> Tensor:
    """Where each landmark walks, up to its sum over tokens, (B, H, N, M).

    ``exp(tau cos - shift)`` with one shift for all tokens, so that plain sums
    merge exactly; it drops out where they are divided by. Arguments as for
    :func:`landmark_queries`.
    """
    return (temperature * _cosines(k, landmarks) - KEY_SHIFT).exp()


def signed(x: Tensor) -> Tensor:
    """``x / sqrt(d)``: the raw product q k^T, which may be negative.

    Args:
        x: (B, H, N, D).

    Returns:
        (B, H, N, D) in float32 or better. Without a sign there is no Perron
        vector: such a graph has no row normalisation and no importance map.
    """
    return x.to(sum_dtype(x.dtype)) / math.sqrt(x.shape[-1])


def relu(x: Tensor) -> Tensor:
    """``relu(x) / sqrt(d)``, (B, H, N, D) to the same shape."""
    return signed(x).relu()


def crelu(x: Tensor) -> Tensor:
    """``[relu(x), relu(-x)] / sqrt(d)``, (B, H, N, D) to (B, H, N, 2 D)."""
    x = signed(x)
    return torch.cat([x, -x], -1).relu()


def focused(x: Tensor) -> Tensor:
    """:func:`crelu`, cubed and rescaled to its old norm: sharper."""
    wide = crelu(x)
    # The peak keeps the cubes in range; it cancels out, gradient and all.
    peak = wide.detach().amax(-1, keepdim=True)
    peak = peak.clamp_min(torch.finfo(wide.dtype).tiny)
    cubes = (wide / peak) ** 3
    # The largest cube is one, unless all are zero.
    shrink = _norm(cubes).clamp_min(1)
    return cubes * (_norm(wide) / shrink)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# Feature maps by the name of their graph, with M as a multiple of D.
FEATURE_MAPS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    'crelu': (crelu, 2),
    'focused': (focused, 2),
    'identity': (signed, 1),
    'relu': (relu, 1),
}
