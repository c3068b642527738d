# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Normalisation that looks at one position only, so bands do not matter."""

from __future__ import annotations

from torch import Tensor, nn


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, rows, columns)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
