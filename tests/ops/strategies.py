# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Random problems for the operator tests."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclasses.dataclass
class Problem:
    """Projected tokens with a mask, in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    discount: Tensor
    valid: Tensor | None
    landmarks: Tensor

    def leaves(self) -> list[Tensor]:
        tensors = [self.q, self.k, self.v, self.discount]
        return [t.requires_grad_() for t in tensors]


@st.composite
def problems(draw: st.DrawFn, max_tokens: int = 24) -> Problem:
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens, width = draw(st.integers(1, max_tokens)), draw(st.integers(1, 6))
    num_landmarks = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    # A shared mean keeps most heads alive, as in a trained network.
    q, k, v = (normal(batch, heads, tokens, width) for _ in range(3))
    shift = draw(st.sampled_from([0.0, 0.5]))
    valid = None
    if draw(st.booleans()):
        valid = torch.rand(batch, tokens, generator=generator) < 0.7
        valid[:, 0] = True
    return Problem(
        q=q + shift,
        k=k + shift,
        v=v,
        discount=torch.rand(
            heads, dtype=torch.float64, generator=generator
        ).clamp(0.05, 0.95),
        valid=valid,
        landmarks=normal(heads, num_landmarks, width),
    )
