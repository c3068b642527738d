# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A segmentor as the list of steps that an executor runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from infsa_seg.layers import Block
from infsa_seg.layers.protocol import GlobalOp, Step, Tap

# Their output at one place depends on the whole image, and they have no state
# that bands could add up.
_WHOLE_IMAGE = (
    nn.GroupNorm,
    _InstanceNorm,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)
# What else can be done about a segmentor.
_WHOLE = ", or test_cfg mode='whole'"


class SegmentorNetwork:
    """The :class:`infsa_seg.layers.protocol.BandNetwork` of a segmentor.

    Args:
        segmentor (nn.Module): mmsegmentation's ``EncoderDecoder``, or a
            subclass, of an ``InfViT`` with an attention of sums and a
            ``BandSegHead``.

    Raises:
        ValueError: A part is neither local nor global, so that bands cannot
            give the result of the whole image; it is named.
    """

    def __init__(self, segmentor: Any) -> None:
        _check(segmentor)
        self.backbone = segmentor.backbone
        self.head = segmentor.decode_head
        self.patch_size: int = self.backbone.patch_size
        self.embed_dims: int = self.backbone.embed_dims
        self.tap_dims: int = self.head.channels
        self.num_classes: int = self.head.out_channels
        self.halo: int = self.head.halo
        self.stride = Fraction(self.patch_size, 2**self.head.num_upsamples)

    def embed(
        self, pixels: Tensor, first: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """See the protocol."""
        return self.backbone.embed(pixels, first, size)

    def steps(self) -> Iterator[Step]:
        """See the protocol."""
        places = {
            self.backbone.out_indices[index]: tap
            for tap, index in enumerate(self.head.in_index)
        }
        for index, layer in enumerate(self.backbone.layers):
            assert isinstance(layer, Block)
            yield from cast(Iterator[Step], layer.steps())
            if index in places:
                yield Tap(functools.partial(self._tap, index, places[index]))

    def decode(self, taps: Tensor, valid: Tensor | None = None) -> Tensor:
        """See the protocol."""
        return self.head.decode_taps(taps, valid)

    def _tap(self, index: int, tap: int, x: Tensor) -> Tensor:
        return self.head.tap(tap, self.backbone.tap(index, x))


def check_backbone(backbone: Any, otherwise: str = '') -> None:
    """Make sure that a backbone is made of local and global operations.

    Args:
        backbone (nn.Module): Of any kind.
        otherwise (str): What else can be done about it, for the message.

    Raises:
        ValueError: It is not; the part is named.
    """
    if not hasattr(backbone, 'steps'):
        raise _refusal('backbone', backbone, f'use InfViT{otherwise}')
    for name, module in backbone.named_modules():
        if not isinstance(module, Block):
            continue
        attn = module.attn
        if attn is not None and not isinstance(attn, GlobalOp):
            raise _refusal(
                f'backbone.{name}.attn.op',
                attn.op,
                f"use attn_cfg=dict(variant='neumann') or 'linear'{otherwise}",
            )
    _check_local('backbone', backbone, otherwise)


def _check_local(name: str, part: nn.Module, otherwise: str) -> None:
    for path, layer in part.named_modules():
        if isinstance(layer, _WHOLE_IMAGE):
            advice = f'use ChannelLayerNorm or none{otherwise}'
            raise _refusal(f'{name}.{path}', layer, advice)


def _check(segmentor: Any) -> None:
    backbone, head = segmentor.backbone, segmentor.decode_head
    if getattr(segmentor, 'with_neck', False):
        raise _refusal('neck', segmentor.neck, f'leave the neck out{_WHOLE}')
    check_backbone(backbone, _WHOLE)
    if not hasattr(head, 'decode_taps'):
        raise _refusal('decode_head', head, f'use BandSegHead{_WHOLE}')
    if head.align_corners:
        raise ValueError(
            'decode_head.align_corners=True resizes by a factor that depends '
            'on the size of the image; set it to False'
        )
    _check_local('decode_head', head, _WHOLE)


def _refusal(name: str, module: Any, advice: str) -> ValueError:
    return ValueError(
        f'{name} ({type(module).__name__}) is neither local nor a sum over '
        f'tokens and cannot run in bands; {advice}'
    )
