# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Top-1 and top-5 accuracy."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmseg.registry import METRICS
from torch import Tensor


@METRICS.register_module()
class TopKAccuracy(BaseMetric):
    """Share of the pictures whose class is among the k with most score.

    One number is kept for each picture, so that those which pad the last
    batches of several ranks are dropped exactly.

    Args:
        topk (Sequence[int]): The k. Defaults to (1, 5).
        collect_device (str): As for mmengine's ``BaseMetric``.
        prefix (str, optional): Likewise. Defaults to 'accuracy'.

    Returns:
        ``accuracy/top1`` and so on, in percent.
    """

    default_prefix = 'accuracy'

    def __init__(
        self,
        topk: Sequence[int] = (1, 5),
        collect_device: str = 'cpu',
        prefix: str | None = None,
    ) -> None:
        super().__init__(collect_device, prefix)
        self.topk = tuple(topk)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the place of each picture's class.

        Raises:
            ValueError: A label is no class of the model.
        """
        for sample in data_samples:
            scores, label = sample['pred_score'], int(sample['gt_label'])
            if not 0 <= label < len(scores):
                raise ValueError(
                    f'{sample.get("img_path", "a picture")}: has the label '
                    f'{label}, but the model has {len(scores)} classes'
                )
            self.results.append(place(scores, label))

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        """Count the places below each k."""
        return {
            f'top{k}': 100 * sum(r < k for r in results) / len(results)
            for k in self.topk
        }


def place(scores: Tensor, label: int) -> int:
    """How many classes go before ``label``, of equal ones the first.

    With a score that is not a number, all do.
    """
    mine = scores[label]
    before = ~(scores <= mine)
    before[:label] |= scores[:label] == mine
    before[label] = mine.isnan()
    return int(torch.count_nonzero(before))
