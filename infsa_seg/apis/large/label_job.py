# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One large image from its file to its label."""

from __future__ import annotations

import dataclasses

from mmengine.model import BaseModel
from torch import Tensor

from infsa_seg.execution import ImportanceSink, Streaming
from infsa_seg.layers import GlobalBranch
from infsa_seg.models.utils import ClassifierNetwork

from .job import LargeJob
from .label_outputs import LabelOutputs
from .options import LargeOptions
from .outputs import Task

# Options that ask for a class of each pixel.
_OF_PIXELS = (
    *('probs', 'areas', 'polygons', 'min_area', 'simplify', 'style'),
    *('pyramid', 'cog', 'palette', 'labels'),
)


class LabelJob(LargeJob):
    """Classifies an image; see :class:`LargeJob`.

    The importance of its tokens is written too, if there is attention.
    """

    kind = 'label'
    outputs: LabelOutputs

    _logits: Tensor | None = None

    @staticmethod
    def network_of(model: BaseModel) -> ClassifierNetwork:
        """See :class:`LargeJob`."""
        return ClassifierNetwork(model)

    @classmethod
    def options_of(
        cls, model: BaseModel, options: LargeOptions
    ) -> LargeOptions:
        """See :class:`LargeJob`."""
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if field.name in _OF_PIXELS and value != field.default:
                raise ValueError(
                    f'--{field.name.replace("_", "-")}: the model has one '
                    'label for the whole image, and no class for each pixel'
                )
        steps = model.backbone.steps()
        has_attention = any(isinstance(step, GlobalBranch) for step in steps)
        return dataclasses.replace(options, centrality=has_attention)

    def _make_outputs(self, task: Task) -> LabelOutputs:
        if self.is_blank:
            raise ValueError(
                f'{self.name}: has no valid pixel, and so no label'
            )
        count = self.network.num_classes
        classes = self.model.dataset_meta.get('classes') or range(count)
        if len(classes) != count:
            raise ValueError(
                f'the checkpoint names {len(classes)} classes, but the model '
                f'has {count}'
            )
        return LabelOutputs(task, [str(name) for name in classes])

    def _compute(
        self, streaming: Streaming, importance: ImportanceSink | None
    ) -> None:
        self._logits = streaming.classify(importance)
        self.outputs.take(self._logits)

    def _compute_again(self, streaming: Streaming) -> float:
        assert self._logits is not None
        return float((streaming.classify() - self._logits).abs().max())
