# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Class maps against their labels, in parts that add up."""

from collections.abc import Sequence

import torch
from mmseg.evaluation import IoUMetric
from torch import Tensor

# Upstream counts in float32, which ends at 2^24.
_PART = 2**22


def count_areas(
    classes: Tensor, labels: Tensor, num_classes: int
) -> list[Tensor]:
    """Pixels of intersection, union, prediction and label by class.

    Args:
        classes (Tensor): Integers of any shape; what is no class, such as
            nodata, does not count.
        labels (Tensor): Of the same shape; likewise.
        num_classes (int): How many classes there are, from 0 on.
    """
    classes, labels = classes.long(), labels.long()
    known = (classes >= 0) & (classes < num_classes) & (labels >= 0)
    # A number that no class has.
    ignored = num_classes
    labels = labels.where(known & (labels < num_classes), ignored)
    parts = zip(
        classes.flatten().split(_PART),
        labels.flatten().split(_PART),
        strict=True,
    )
    areas = [
        torch.stack(
            IoUMetric.intersect_and_union(*part, num_classes, ignored)
        ).double()
        for part in parts
    ]
    return list(torch.stack(areas).sum(0))


def mean_iou(areas: Sequence[Tensor]) -> tuple[float, float]:
    """Mean IoU of the classes that occur, and pixel accuracy, in percent.

    Args:
        areas (sequence): Of :func:`count_areas`, or several of them added.
    """
    metrics = IoUMetric.total_area_to_metrics(*areas)
    iou = 100 * metrics['IoU']
    return float(iou[iou == iou].mean()), 100 * float(metrics['aAcc'])
