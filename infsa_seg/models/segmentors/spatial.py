# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The losses of one image that lies on several ranks."""

from __future__ import annotations

from mmseg.models.segmentors import EncoderDecoder
from torch import Tensor

from infsa_seg.execution import SpatialParallel, spatial_forward

from ..utils import SegmentorNetwork


def spatial_loss(
    segmentor: EncoderDecoder,
    pixels: Tensor,
    label: Tensor,
    height: int,
    parallel: SpatialParallel,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:
    """This rank's share of the losses of a batch, by name.

    The shares of a spatial group add up to the losses of the whole images;
    the gradients of the parameters have to be added up likewise. With
    ``with_cp`` in the backbone, layers are recomputed in the backward pass.

    Args:
        segmentor: of an ``InfViT`` and a ``BandSegHead`` whose losses are in
            strips, such as ``BandCrossEntropyLoss``.
        pixels: (B, channels, rows, width), the pixel rows of this rank's
            band, normalised; the other arguments as for
            :func:`infsa_seg.execution.spatial_forward`.
        label: int64 (B, rows, width), the labels of the same rows.
        height: of the images in pixels.
        parallel: the group.
        valid: bool (B, token rows, token columns) of the band; None for all.

    Raises:
        ValueError: the segmentor cannot run in bands, or has another loss.
    """
    result = spatial_forward(
        SegmentorNetwork(segmentor),
        pixels,
        height,
        parallel,
        valid,
        recompute=segmentor.backbone.with_cp,
    )
    return segmentor.decode_head.band_losses(
        result.logits, label, result.place, parallel.merge
    )
