# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pixels to tokens."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PatchEmbed(nn.Module):
    """Cut a picture into patches and project each to a token.

    Args:
        in_channels: spectral channels of the picture.
        embed_dims: channels of a token.
        patch_size: side of a patch in pixels.
    """

    halo = 0

    def __init__(
        self, in_channels: int, embed_dims: int, patch_size: int
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(
            in_channels, embed_dims, patch_size, stride=patch_size
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) to (B, rows, columns, C).

        Sides that are not multiples of the patch are padded with zeros at
        the right and the bottom. A band of pixel rows starts at a multiple of
        the patch, and so does the rest of the picture below it.
        """
        height, width = x.shape[-2:]
        x = F.pad(
            x, (0, -width % self.patch_size, 0, -height % self.patch_size)
        )
        return self.projection(x).permute(0, 2, 3, 1)
