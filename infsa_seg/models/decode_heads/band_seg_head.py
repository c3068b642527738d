# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A decode head of local operations only."""

from __future__ import annotations

from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import MODELS
from torch import Tensor, nn

from infsa_seg.layers import ChannelLayerNorm


@MODELS.register_module()
class BandSegHead(BaseDecodeHead):
    """Decode plain feature maps band by band (DESIGN section 4).

    A 1x1 convolution per tap, summed, so that no tap has to be stored;
    normalisation over channels; then ``num_upsamples`` times a doubling by
    transposed convolution and a 3x3 refinement; classifier. Nothing pools or
    normalises over space, so a band with ``halo`` token rows around it gives
    the very logits of the whole image.

    Args:
        num_upsamples (int): Doublings of the token grid before the
            classifier; 2 brings patches of 16 pixels to stride 4. With 0
            there is one refinement at token stride. Defaults to 2.
        **kwargs: As for mmsegmentation's ``BaseDecodeHead``; ``in_channels``
            and ``in_index`` are lists, one entry per tap.

    Attributes:
        halo (int): Token rows of context on each side, the bilinear resizing
            of the logits to pixels included.
    """

    def __init__(self, num_upsamples: int = 2, **kwargs) -> None:
        super().__init__(input_transform='multiple_select', **kwargs)
        self.num_upsamples = num_upsamples
        self.fuse = nn.ModuleList(
            nn.Conv2d(width, self.channels, 1) for width in self.in_channels
        )
        self.norm = ChannelLayerNorm(self.channels)
        doublings = [
            nn.Sequential(
                nn.ConvTranspose2d(self.channels, self.channels, 2, stride=2),
                ChannelLayerNorm(self.channels),
                nn.GELU(),
                self._refinement(),
            )
            for _ in range(num_upsamples)
        ]
        self.decode = nn.Sequential(*(doublings or [self._refinement()]))

    def _refinement(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(self.channels, self.channels, 3, padding=1),
            ChannelLayerNorm(self.channels),
            nn.GELU(),
        )

    @property
    def halo(self) -> int:
        reach = 1  # the bilinear resizing, in rows of the classifier's stride
        for _ in range(self.num_upsamples):
            reach = -(-(reach + 1) // 2)
        return reach if self.num_upsamples else reach + 1

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Turn taps (B, C, rows, columns) into logits.

        Returns:
            (B, classes, rows * 2^num_upsamples, columns * 2^num_upsamples).
        """
        taps = self._transform_inputs(inputs)
        x = sum(fuse(tap) for fuse, tap in zip(self.fuse, taps, strict=True))
        return self.cls_seg(self.decode(self.norm(x)))
