# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Losses that never hold the logits of all pixels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from mmseg.models.losses.utils import get_class_weight
from mmseg.registry import MODELS
from torch import Tensor, nn

from infsa_seg.layers.protocol import Merge, identity
from infsa_seg.ops import Axis, Place, sum_dtype

from .cross_entropy import sum_cross_entropy
from .dice import dice_loss, sum_overlaps
from .ohem import HardPixels
from .strips import Strips


class Terms(NamedTuple):
    """The loss of a batch, and how good its classes are.

    Attributes:
        loss: (), this band's share of the loss of the batch.
        accuracy: (1,), percentage of right pixels in all bands, as
            mmsegmentation's ``acc_seg``.
    """

    loss: Tensor
    accuracy: Tensor


class BandLoss(nn.Module):
    """A loss at the size of the labels, in strips.

    It takes the logits of the decoder as they are, and resizes, scores and
    differentiates them strip by strip. Value and gradient are those of
    resizing them all (bilinear, ``align_corners=False``) and the plain loss.
    Without a pixel that is not ignored the loss is zero, and so are its
    gradients.

    Args:
        loss_weight (float): Factor.
        max_logits (int): Numbers of resized logits that may exist at once.
        loss_name (str): Name in the log.
    """

    def __init__(
        self, loss_weight: float, max_logits: int, loss_name: str
    ) -> None:
        super().__init__()
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
            merge: adds the sums of the bands that others hold. The losses of
                all bands then add up to that of the image, and so do their
                gradients.

        Raises:
            ValueError: for a single class, or if ``max_logits`` does not
                allow a single pixel.
            ValueError: a label is no class and not ``ignore_index``.
        """
        num_classes = seg_logits.shape[1]
        name = type(self).__name__
        if num_classes < 2:
            raise ValueError(
                f'{name} needs two classes or more, not {num_classes}; use '
                f'{name.removeprefix("Band")} with use_sigmoid=True'
            )
        if place is None:
            place = Place(
                Axis(0, seg_logits.shape[2], label.shape[1]),
                Axis(0, seg_logits.shape[3], label.shape[2]),
            )
        strips = Strips(
            label, num_classes, place, ignore_index, self.max_logits
        )
        terms = self._terms(seg_logits, strips, merge)
        dtype = sum_dtype(seg_logits.dtype)
        return Terms(
            self.loss_weight * terms.loss.to(dtype), terms.accuracy.to(dtype)
        )

    @abstractmethod
    def _terms(self, logits: Tensor, strips: Strips, merge: Merge) -> Terms:
        """The terms in float64, without ``loss_weight``."""

    def forward(
        self,
        cls_score: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = 255,
        **kwargs: Any,
    ) -> Tensor:
        """The loss alone; arguments as for :meth:`terms`.

        Raises:
            ValueError: with weights of single pixels.
        """
        if weight is not None:
            name = type(self).__name__
            raise ValueError(
                f'{name} takes no weights of pixels; leave the sampler out '
                f'or use {name.removeprefix("Band")}'
            )
        return self.terms(cls_score, label, ignore_index, **kwargs).loss


@MODELS.register_module()
class BandCrossEntropyLoss(BandLoss):
    """``CrossEntropyLoss`` at the size of the labels, in strips.

    The mean is over the pixels of the batch that are not ignored, weighted by
    their classes: sum of w[y] * loss over sum of w[y], as PyTorch's
    ``reduction='mean'``. See :class:`BandLoss` for what strips are.

    With ``ohem`` only the hardest pixels count, as with mmsegmentation's
    ``OHEMPixelSampler``: those to whose class the network gives a probability
    below ``thresh``, and in any case the ``min_kept`` (times the images of
    the batch) with the lowest; without ``thresh`` those with the highest
    weighted loss. One or two more walks over the strips (up to four in
    float64) find the limit exactly, over all bands, with counts of 2 MiB.
    It differs in three ways:

    * the mean is over the weight of the pixels that are kept, not of all
      that are not ignored, so that the loss does not shrink with their
      number; ``avg_non_ignore=False`` divides by all pixels there as here;
    * pixels as hard as the last one that is kept are kept too, where
      mmsegmentation with ``thresh`` drops them all and without it keeps
      those it happens to find first;
    * if there are no more than ``min_kept``, all are kept, where
      mmsegmentation with ``thresh`` drops the easiest one.

    Args:
        class_weight (list[float] | str, optional): Weight of each class, or
            the file that has them. Defaults to None, all alike.
        avg_non_ignore (bool): False divides by the number of all pixels,
            ignored ones included, mmsegmentation's default; not with class
            weights. Defaults to True.
        ohem (dict, optional): ``thresh`` and ``min_kept`` of
            :class:`~infsa_seg.models.losses.ohem.HardPixels`. Defaults to
            None, all pixels.
        loss_weight (float): Factor. Defaults to 1.
        max_logits (int): Numbers of resized logits that may exist at once.
            Defaults to 2**23, 32 MiB in float32.
        loss_name (str): Name in the log. Defaults to 'loss_ce'.

    Raises:
        ValueError: ``avg_non_ignore=False`` with class weights: ignored
            pixels have no class. Values in ``ohem`` that keep no pixel.
    """

    def __init__(
        self,
        class_weight: list[float] | str | None = None,
        avg_non_ignore: bool = True,
        ohem: dict[str, Any] | None = None,
        loss_weight: float = 1.0,
        max_logits: int = 2**23,
        loss_name: str = 'loss_ce',
    ) -> None:
        super().__init__(loss_weight, max_logits, loss_name)
        if class_weight is not None and not avg_non_ignore:
            raise ValueError(
                'avg_non_ignore=False counts ignored pixels, which have no '
                'class and so no class_weight; leave one of them out'
            )
        self.class_weight = get_class_weight(class_weight)
        self.avg_non_ignore = avg_non_ignore
        self.ohem = None if ohem is None else HardPixels(**ohem)

    def _terms(self, logits: Tensor, strips: Strips, merge: Merge) -> Terms:
        weight, border = None, None
        if self.class_weight is not None:
            weight = torch.as_tensor(
                self.class_weight,
                dtype=sum_dtype(logits.dtype),
                device=logits.device,
            )
        if self.ohem is not None:
            border = self.ohem.border(logits, strips, weight, merge)
        loss, counts = sum_cross_entropy(logits, strips, weight, border)
        if not self.avg_non_ignore:
            counts.weight = torch.full_like(
                counts.weight, strips.label[0].numel()
            )
        counts = merge(counts)
        total = counts.weight.sum()
        # Nothing to divide: the sum is zero too, and keeps its graph.
        return Terms(
            loss / torch.where(total > 0, total, 1), counts.accuracy()
        )


@MODELS.register_module()
class BandDiceLoss(BandLoss):
    """``DiceLoss`` over softmax at the size of the labels, in strips.

    With p the probability of a class and t its target, 1 in its own pixels
    and 0 in others, Dice is 2 Σ p t / (Σ p² + Σ t² + 2 eps), or with
    ``naive_dice`` (2 Σ p t + eps) / (Σ p + Σ t + eps); the loss is 1 - Dice.
    See :class:`BandLoss` for what strips are.

    With ``per_class=False, per_image=True`` and no ignored pixel it is
    mmsegmentation's ``DiceLoss(use_sigmoid=False)``, which sums over the
    pixels of all classes together, so that frequent classes outweigh rare
    ones; by default each class counts alike. It differs from it in two ways:

    * ignored pixels count nowhere, where mmsegmentation counts their
      probabilities in Σ p² and leaves out the class whose number is
      ``ignore_index``;
    * the mean is over those classes (or images) that have target pixels: to
      others Dice says nothing, whatever ``eps`` makes of it. Their
      probability is missing elsewhere, and so counts there.

    Args:
        naive_dice (bool): Sum probabilities instead of their squares.
            Defaults to False.
        per_class (bool): Mean over the classes; False takes them together.
            Defaults to True.
        per_image (bool): Mean over the images of the batch; False takes them
            together. With both, over all pairs of an image and a class.
            Defaults to False.
        eps (float): Keeps the quotient from 0 / 0. Defaults to 1e-3.
        loss_weight (float): Factor. Defaults to 1.
        max_logits (int): Numbers of resized logits that may exist at once.
            Defaults to 2**23, 32 MiB in float32.
        loss_name (str): Name in the log. Defaults to 'loss_dice'.

    Raises:
        ValueError: ``eps`` is negative.
    """

    def __init__(
        self,
        naive_dice: bool = False,
        per_class: bool = True,
        per_image: bool = False,
        eps: float = 1e-3,
        loss_weight: float = 1.0,
        max_logits: int = 2**23,
        loss_name: str = 'loss_dice',
    ) -> None:
        super().__init__(loss_weight, max_logits, loss_name)
        if eps < 0:
            raise ValueError(f'eps={eps} is negative; use zero or more')
        self.naive_dice = naive_dice
        self.per_class = per_class
        self.per_image = per_image
        self.eps = eps

    def _terms(self, logits: Tensor, strips: Strips, merge: Merge) -> Terms:
        squared = not self.naive_dice
        sums = merge(sum_overlaps(logits, strips, squared))
        together = [
            dim
            for dim, apart in enumerate((self.per_image, self.per_class))
            if not apart
        ]
        overlap, mass, target = (
            x.sum(together, keepdim=True) if together else x
            for x in (sums.overlap, sums.mass, sums.target)
        )
        loss = dice_loss(overlap, mass, target, self.eps, squared)
        # All parts know all sums; what is equal in each they share out.
        return Terms(loss / sums.parts[0], sums.accuracy())
