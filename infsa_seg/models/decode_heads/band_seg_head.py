# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A decode head of local operations only."""

from __future__ import annotations

from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import MODELS
from mmseg.utils import SampleList
from torch import Tensor, nn

from infsa_seg.layers import ChannelLayerNorm
from infsa_seg.layers.protocol import Merge, identity
from infsa_seg.ops import Place

from ..losses import BandLoss


@MODELS.register_module()
class BandSegHead(BaseDecodeHead):
    """Decode plain feature maps band by band (DESIGN section 4).

    A 1x1 convolution per tap, summed, so that no tap has to be stored;
    normalisation over channels; then ``num_upsamples`` times a doubling by
    transposed convolution and a 3x3 refinement; classifier. Nothing pools or
    normalises over space, so a band with ``halo`` token rows around it gives
    the very logits of the whole image.

    With ``loss_decode=dict(type='BandCrossEntropyLoss')``, or a list of that
    and ``BandDiceLoss``, training resizes the logits in strips, and those of
    all pixels never exist.

    Args:
        num_upsamples (int): Doublings of the token grid before the
            classifier; 2 brings patches of 16 pixels to stride 4. With 0
            there is one refinement at token stride. Defaults to 2.
        **kwargs: As for mmsegmentation's ``BaseDecodeHead``; ``in_channels``
            and ``in_index`` are lists, one entry per tap.

    Attributes:
        halo (int): Token rows of context on each side, the bilinear resizing
            of the logits to pixels included.

    Raises:
        ValueError: a loss in strips together with a sampler, with
            ``align_corners`` or with losses that are not in strips.
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
        self._check_loss()

    @property
    def _losses(self) -> list[nn.Module]:
        several = isinstance(self.loss_decode, nn.ModuleList)
        return list(self.loss_decode) if several else [self.loss_decode]

    @property
    def _band_losses(self) -> list[BandLoss]:
        return [loss for loss in self._losses if isinstance(loss, BandLoss)]

    @property
    def loss_in_bands(self) -> bool:
        """Whether all losses are in strips, so that a band will do."""
        return 0 < len(self._band_losses) == len(self._losses)

    @property
    def max_logits(self) -> int:
        """Numbers of resized logits that losses in strips hold at most."""
        return max(loss.max_logits for loss in self._band_losses)

    def _check_loss(self) -> None:
        names = [type(loss).__name__ for loss in self._band_losses]
        if not names:
            return
        if not self.loss_in_bands:
            raise ValueError(
                f'{names[0]} in a list with losses that are not in strips '
                'would get the logits of all pixels; let all be in strips, '
                'or none'
            )
        if self.sampler:
            raise ValueError(
                f'{names[0]} does not go with a sampler; give '
                "dict(type='BandCrossEntropyLoss', ohem=dict(...)) its "
                'thresh and min_kept instead'
            )
        if self.align_corners:
            raise ValueError(
                f'{names[0]} does not go with align_corners=True; leave it '
                f'out or use {names[0].removeprefix("Band")}'
            )

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

    def tap(self, index: int, x: Tensor) -> Tensor:
        """What tap ``index``, (B, rows, columns, C), contributes.

        Returns:
            (B, rows, columns, channels), to be summed over the taps.
        """
        fuse = self.fuse[index]
        return fuse(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def decode_taps(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Turn the sum of the taps into logits.

        Args:
            x: (B, rows, columns, channels).
            valid: (B, rows, columns) bool; the convolutions see zeros where
                it is False, as they do beyond the border. None for all.

        Returns:
            (B, classes, rows * 2^num_upsamples, columns * 2^num_upsamples).
        """
        x = self.norm(x.permute(0, 3, 1, 2))
        hidden = None if valid is None else ~valid[:, None]
        for stage in self.decode:
            refinement = stage
            if self.num_upsamples:
                assert isinstance(stage, nn.Sequential)
                x, refinement = stage[:-1](x), stage[-1]
                if hidden is not None:
                    hidden = hidden.repeat_interleave(2, -2)
                    hidden = hidden.repeat_interleave(2, -1)
            if hidden is not None:
                x = x.masked_fill(hidden, 0)
            x = refinement(x)
        return self.cls_seg(x)

    def forward(
        self, inputs: tuple[Tensor, ...], valid: Tensor | None = None
    ) -> Tensor:
        """Turn taps (B, C, rows, columns) into logits.

        Args:
            inputs: the feature maps of the backbone.
            valid: as for :meth:`decode_taps`, whose result this returns.
        """
        taps = self._transform_inputs(inputs)
        fused = [
            self.tap(index, tap.permute(0, 2, 3, 1))
            for index, tap in enumerate(taps)
        ]
        return self.decode_taps(sum(fused[1:], fused[0]), valid)

    def loss_by_feat(
        self, seg_logits: Tensor, batch_data_samples: SampleList
    ) -> dict:
        """The losses of a batch by name, and its accuracy."""
        if not self.loss_in_bands:
            return super().loss_by_feat(seg_logits, batch_data_samples)
        label = self._stack_batch_gt(batch_data_samples).squeeze(1)
        return self.band_losses(seg_logits, label)

    def band_losses(
        self,
        seg_logits: Tensor,
        label: Tensor,
        place: Place | None = None,
        merge: Merge = identity,
    ) -> dict[str, Tensor]:
        """A band's share of the losses; see ``BandLoss.terms``.

        Raises:
            ValueError: another loss is configured.
        """
        if not self.loss_in_bands:
            raise ValueError(
                'a band alone needs decode_head.loss_decode='
                "dict(type='BandCrossEntropyLoss') or a list of losses in "
                'strips'
            )
        losses: dict[str, Tensor] = {}
        for loss in self._band_losses:
            terms = loss.terms(
                seg_logits, label, self.ignore_index, place, merge
            )
            before = losses.get(loss.loss_name, 0)
            losses[loss.loss_name] = before + terms.loss
            # All see the same pixels, and tell the same of them.
            losses['acc_seg'] = terms.accuracy
        return losses
