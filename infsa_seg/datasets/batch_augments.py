# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is done to a batch of pictures and to their labels in training.

Each is a callable that takes normalised pictures (B, channels, height,
width) and label weights (B, classes), and returns both.
"""

from __future__ import annotations

import torch
from mmseg.registry import TRANSFORMS
from torch import Tensor

from .pictures import require_kornia


@TRANSFORMS.register_module()
class BatchRandomErasing:
    """kornia's ``RandomErasing``: a rectangle becomes 0, the mean.

    Args:
        prob (float): Share of the pictures. Defaults to 0.25.
        area_range (tuple[float, float]): Share of the picture that is
            erased. Defaults to (0.02, 1/3).
        aspect_range (tuple[float, float]): Height over width of the
            rectangle. Defaults to (0.3, 10/3).

    Raises:
        ImportError: kornia is not installed.
    """

    def __init__(
        self,
        prob: float = 0.25,
        area_range: tuple[float, float] = (0.02, 1 / 3),
        aspect_range: tuple[float, float] = (0.3, 10 / 3),
    ) -> None:
        require_kornia()
        from kornia.augmentation import RandomErasing

        # A config has lists.
        (least, most), (flat, high) = area_range, aspect_range
        self._erase = RandomErasing(
            (least, most), (flat, high), value=0.0, p=prob
        )

    def __call__(
        self, inputs: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Erase; the label weights stay."""
        return self._erase(inputs), scores


@TRANSFORMS.register_module()
class MixUpCutMix:
    """MixUp or CutMix, one of them for the whole batch.

    MixUp adds two pictures, CutMix pastes a rectangle of one into the other;
    labels are weighted likewise, by the area where a rectangle is pasted.
    Every picture has a partner and a weight of its own. kornia cuts; it draws
    the weights of its MixUp evenly, where the recipe has Beta(alpha, alpha).

    Args:
        mixup_alpha (float): Of the weights of MixUp; 0 for none.
            Defaults to 0.8.
        cutmix_alpha (float): Of the areas of CutMix; 0 for none.
            Defaults to 1.
        prob (float): Share of the batches that are mixed. Defaults to 1.
        switch_prob (float): Share of those that get CutMix, where both are
            on. Defaults to 0.5.

    Raises:
        ImportError: kornia, for CutMix, is not installed.
        ValueError: Both are off.
    """

    def __init__(
        self,
        mixup_alpha: float = 0.8,
        cutmix_alpha: float = 1.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
    ) -> None:
        if not (mixup_alpha or cutmix_alpha):
            raise ValueError(
                'MixUpCutMix: mixup_alpha and cutmix_alpha are both 0; leave '
                'it out instead'
            )
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.prob = prob
        if mixup_alpha and cutmix_alpha:
            self.switch_prob = switch_prob
        else:
            self.switch_prob = float(not mixup_alpha)
        if self.switch_prob:
            require_kornia()
            from kornia.augmentation import RandomCutMixV2

            self._cutmix = RandomCutMixV2(
                beta=cutmix_alpha,
                data_keys=['input', 'class'],
                use_correct_lambda=True,
            )

    def __call__(
        self, inputs: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mix; the new label weights sum to what the old ones did."""
        if torch.rand(()) >= self.prob:
            return inputs, scores
        if torch.rand(()) < self.switch_prob:
            inputs, partner, own = self._cut(inputs)
        else:
            inputs, partner, own = self._mix(inputs)
        own = own.to(scores)[:, None]
        return inputs, own * scores + (1 - own) * scores[partner]

    def _mix(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = len(inputs)
        alpha = torch.tensor(float(self.mixup_alpha))
        own = torch.distributions.Beta(alpha, alpha).sample((batch,))
        own = own.to(inputs)
        partner = torch.randperm(batch).to(inputs.device)
        weight = own.view(-1, 1, 1, 1)
        mixed = weight * inputs + (1 - weight) * inputs[partner]
        return mixed, partner, own

    def _cut(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # In place of labels, the pictures' numbers: partners come back.
        numbers = torch.arange(len(inputs), device=inputs.device)
        mixed, labels = self._cutmix(inputs, numbers)
        _, partner, own = labels[0].unbind(-1)
        return mixed, partner.long(), own
