# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Cross-entropy that never holds the logits of all pixels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from mmseg.models.losses.utils import get_class_weight
from mmseg.registry import MODELS
from torch import Tensor, nn

from infsa_seg.layers.protocol import Merge, identity
from infsa_seg.ops import Axis, Place

from .strips import sum_cross_entropy


class Terms(NamedTuple):
    """The loss of a batch, and how good its classes are.

    Attributes:
        loss: (), this band's share of the loss of the batch.
        accuracy: (1,), percentage of right pixels in all bands, as
            mmsegmentation's ``acc_seg``.
    """

    loss: Tensor
    accuracy: Tensor


@MODELS.register_module()
class BandCrossEntropyLoss(nn.Module):
    """``CrossEntropyLoss`` at the size of the labels, in strips.

    It takes the logits of the decoder as they are, and resizes, scores and
    differentiates them strip by strip. Value and gradient are those of
    resizing them all (bilinear, ``align_corners=False``) and
    ``torch.nn.functional.cross_entropy``.

    The mean is over the pixels of the batch that are not ignored, weighted by
    their classes: sum of w[y] * loss over sum of w[y], as PyTorch's
    ``reduction='mean'``. Without such a pixel the loss is zero, and so are
    its gradients.

    Args:
        class_weight (list[float] | str, optional): Weight of each class, or
            the file that has them. Defaults to None, all alike.
        avg_non_ignore (bool): False divides by the number of all pixels,
            ignored ones included, mmsegmentation's default; not with class
            weights. Defaults to True.
        loss_weight (float): Factor. Defaults to 1.
        max_logits (int): Numbers of resized logits that may exist at once.
            Defaults to 2**23, 32 MiB in float32.
        loss_name (str): Name in the log. Defaults to 'loss_ce'.

    Raises:
        ValueError: ``avg_non_ignore=False`` with class weights: ignored
            pixels have no class.
    """

    def __init__(
        self,
        class_weight: list[float] | str | None = None,
        avg_non_ignore: bool = True,
        loss_weight: float = 1.0,
        max_logits: int = 2**23,
        loss_name: str = 'loss_ce',
    ) -> None:
        super().__init__()
        if class_weight is not None and not avg_non_ignore:
            raise ValueError(
                'avg_non_ignore=False counts ignored pixels, which have no '
                'class and so no class_weight; leave one of them out'
            )
        self.class_weight = get_class_weight(class_weight)
        self.avg_non_ignore = avg_non_ignore
        self.loss_weight = loss_weight
        self.max_logits = max_logits
        self.loss_name = loss_name

    def terms(
        self,
        seg_logits: Tensor,
        label: Tensor,
        ignore_index: int = 255,
        place: Place | None = None,
        merge: Merge = identity,
    ) -> Terms:
        """The loss, and the accuracy from the same pass.

        Args:
            seg_logits: (B, classes, height, width), of the whole image or of
                a band with its halo.
            label: int64 (B, rows, columns), of the image or the band.
            ignore_index: label of pixels that do not count.
            place: of the band; None for a whole image.
            merge: adds the counts of the bands that others hold. The loss is
                then (sum of this band) / (count of all).

        Raises:
            ValueError: for a single class, which has no cross-entropy.
        """
        num_classes = seg_logits.shape[1]
        if num_classes < 2:
            raise ValueError(
                f'BandCrossEntropyLoss needs two classes or more, not '
                f'{num_classes}; use CrossEntropyLoss with use_sigmoid=True'
            )
        if place is None:
            place = Place(
                Axis(0, seg_logits.shape[2], label.shape[1]),
                Axis(0, seg_logits.shape[3], label.shape[2]),
            )
        weight = None
        if self.class_weight is not None:
            weight = torch.as_tensor(self.class_weight, dtype=torch.float64)
        loss, counts = sum_cross_entropy(
            seg_logits,
            label,
            *place,
            class_weight=weight,
            ignore_index=ignore_index,
            max_logits=self.max_logits,
        )
        if not self.avg_non_ignore:
            counts.weight = torch.full_like(counts.weight, label[0].numel())
        counts = merge(counts)
        total = counts.weight.sum()
        # Nothing to divide: the sum is zero too, and keeps its graph.
        loss = loss / torch.where(total > 0, total, 1)
        accuracy = 100 * counts.correct.sum() / counts.valid.sum().clamp(min=1)
        return Terms(self.loss_weight * loss, accuracy[None])

    def forward(
        self,
        cls_score: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = 255,
        **kwargs,
    ) -> Tensor:
        """The loss alone; arguments as for :meth:`terms`.

        Raises:
            ValueError: with weights of single pixels.
        """
        if weight is not None:
            raise ValueError(
                'BandCrossEntropyLoss takes no weights of pixels; leave the '
                'sampler out or use CrossEntropyLoss'
            )
        return self.terms(cls_score, label, ignore_index, **kwargs).loss
