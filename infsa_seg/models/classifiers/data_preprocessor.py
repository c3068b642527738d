# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""From pictures of a data loader to the batch that a classifier sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from mmseg.registry import MODELS, TRANSFORMS
from torch import Tensor
from torch.nn import functional as F


@MODELS.register_module()
class ClsDataPreprocessor(BaseDataPreprocessor):
    """Stacks pictures, normalises them and, in training, augments the batch.

    Pictures of different sizes are padded with zeros at the right and the
    bottom; a classifier leaves tokens of padding out.

    Args:
        mean, std (Sequence[float]): Of each channel, in the order in which
            the network sees them. Defaults to 0 and 1.
        bgr_to_rgb (bool): Whether pictures come with blue first, as mmcv
            reads them, and the network wants red first. Defaults to False.
        num_classes (int, optional): For ``batch_augments``.
        batch_augments (Sequence[dict]): What to do to a normalised batch in
            training, in order: configs of callables that take the pictures
            (B, channels, height, width) and their label weights (B, classes)
            and return both. The weights go into each sample's
            ``gt_score``. Defaults to nothing.
        non_blocking (bool): Whether copies to the device may overlap.

    Raises:
        ValueError: There are ``batch_augments`` and no ``num_classes``.
    """

    def __init__(
        self,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        bgr_to_rgb: bool = False,
        num_classes: int | None = None,
        batch_augments: Sequence[dict] = (),
        non_blocking: bool = False,
    ) -> None:
        super().__init__(non_blocking)
        if batch_augments and not num_classes:
            raise ValueError(
                'data_preprocessor: batch_augments change labels; set '
                'num_classes'
            )
        # Not buffers: a network in half precision would round them.
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.bgr_to_rgb = bgr_to_rgb
        self.num_classes = num_classes
        self.batch_augments = [TRANSFORMS.build(a) for a in batch_augments]

    def forward(self, data: dict, training: bool = False) -> dict[str, Any]:
        """The batch on the device.

        Args:
            data: ``inputs``, pictures (channels, height, width) in a list or
                stacked; ``data_samples``, one for each, or none.
            training: Whether to augment.

        Returns:
            ``inputs``, float32 (B, channels, height, width), and
            ``data_samples``.

        Raises:
            ValueError: A label is no class, where the batch is augmented.
        """
        data = self.cast_data(data)
        inputs = _stack([self._normalise(x) for x in data['inputs']])
        samples = data.get('data_samples')
        if training and self.batch_augments:
            assert samples is not None and self.num_classes is not None
            scores = one_hot(samples, self.num_classes).to(inputs.device)
            for augment in self.batch_augments:
                inputs, scores = augment(inputs, scores)
            for sample, score in zip(samples, scores, strict=True):
                sample.gt_score = score
        return {'inputs': inputs, 'data_samples': samples}

    def _normalise(self, x: Tensor) -> Tensor:
        if self.bgr_to_rgb:
            x = x.flip(0)
        mean = torch.tensor(self.mean, device=x.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=x.device).view(-1, 1, 1)
        return (x.float() - mean) / std


def one_hot(samples: Sequence[Any], num_classes: int) -> Tensor:
    """Label weights of data samples, float32 (B, classes), on the CPU.

    Raises:
        ValueError: A label is no class.
    """
    labels = torch.tensor([int(sample.gt_label) for sample in samples])
    for label, sample in zip(labels.tolist(), samples, strict=True):
        if not 0 <= label < num_classes:
            raise ValueError(
                f'{sample.get("img_path", "a picture")}: has the label '
                f'{label}, but the model has {num_classes} classes; set '
                'num_classes of the model'
            )
    return F.one_hot(labels, num_classes).float()


def _stack(pictures: list[Tensor]) -> Tensor:
    height = max(x.shape[1] for x in pictures)
    width = max(x.shape[2] for x in pictures)
    return torch.stack(
        [
            F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1]))
            for x in pictures
        ]
    )
