# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What becomes of the one label of a large image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..pictures import write_heat
from .outputs import OVERVIEW, Outputs, Task, write_json

# Classes that a picture names.
_TOP = 5


class LabelOutputs(Outputs):
    """Writes the label of an image, and what it rests on.

    Args:
        task (Task): As for :class:`Outputs`.
        classes (sequence): Names of the classes.
    """

    def __init__(self, task: Task, classes: Sequence[str]) -> None:
        super().__init__(task)
        self.classes = list(classes)
        self.scores = np.full(len(self.classes), np.nan)
        # Every so many tokens, for the picture.
        self._step = -(-max(self.grid.shape) // OVERVIEW)
        self._heat = np.full(
            [-(-side // self._step) for side in self.grid.shape],
            np.nan,
            np.float32,
        )

    @property
    def resident_bytes(self) -> int:
        """What is held whatever the bands."""
        held = super().resident_bytes + self._heat.nbytes
        if 'overview' in self.paths:
            height, width = self._picture_size
            wide = self.meta.dtype != 'u1'
            held += height * width * (64 if wide else 32)
        return held

    def take(self, logits: Tensor) -> None:
        """Take the logits of the image, (1, classes).

        Raises:
            ValueError: They are not finite.
        """
        if not logits.isfinite().all():
            raise ValueError(
                'the logits are not finite; use --dtype fp32, or check the '
                'weights'
            )
        self.scores = logits[0].double().softmax(0).cpu().numpy()

    def sink_importance(self, row: int, values: Tensor) -> None:
        """See :class:`Outputs`."""
        super().sink_importance(row, values)
        some = values[-row % self._step :: self._step, :: self._step].numpy()
        first = -(-row // self._step)
        self._heat[first : first + len(some)] = some

    def finish(self) -> None:
        """See :class:`Outputs`."""
        super().finish()
        ranking = self._ranking()
        first = ranking[0]
        write_json(
            self._places['label'],
            {
                'label': first['class'],
                'index': first['index'],
                'score': first['score'],
                'scores': ranking,
            },
        )

    def summary(self) -> dict[str, Any]:
        """See :class:`Outputs`."""
        return {'scores': self._ranking()[:_TOP], **super().summary()}

    def _ranking(self) -> list[dict[str, Any]]:
        """The classes with their scores, the best first."""
        order = np.argsort(-self.scores, kind='stable').tolist()
        return [
            {
                'class': self.classes[index],
                'index': index,
                'score': float(f'{self.scores[index]:.6g}'),
            }
            for index in order
        ]

    @property
    def _picture_size(self) -> tuple[int, int]:
        height, width = self.meta.height, self.meta.width
        scale = min(OVERVIEW / max(height, width), 1)
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def _draw(self, path: Path) -> None:
        height, width = self._picture_size
        picture, _ = self._thumbnail(height, width)
        window, meta = self.image.window, self.meta
        side = self.grid.patch_size * self._step
        rows = _tokens_at(height, meta.height, window.row, window.height, side)
        columns = _tokens_at(width, meta.width, window.col, window.width, side)
        # What lies outside is read from the last row or column.
        padded = np.pad(self._heat, (0, 1), constant_values=np.nan)
        heat = padded[np.ix_(rows, columns)]
        titles = [
            f'{item["class"]}  {item["score"]:.1%}'
            for item in self._ranking()[:_TOP]
        ]
        if 'centrality' in self.paths:
            titles += ['', 'received by a token:']
        write_heat(path, picture, heat, titles)


def _tokens_at(
    size: int, full: int, first: int, length: int, side: int
) -> np.ndarray:
    """The token below each pixel of a picture, along one side of it.

    Args:
        size: pixels of the picture.
        full: pixels of the raster.
        first, length: pixels of the raster that have tokens.
        side: pixels of the raster per token.

    Returns:
        (size,) of int; -1 where there is no token.
    """
    pixels = ((np.arange(size) + 0.5) * full / size).astype(int) - first
    inside = (pixels >= 0) & (pixels < length)
    return np.where(inside, pixels // side, -1)
