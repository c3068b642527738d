# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One large image from its file to its label."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mmengine.model import BaseModel
from torch import Tensor

from infsa_seg.execution import ImportanceSink, Streaming
from infsa_seg.layers import GlobalBranch
from infsa_seg.models.utils import ClassifierNetwork

from .job import LargeJob
from .label_outputs import LabelOutputs
from .manifest import describe_run
from .options import LargeOptions
from .sources import Source

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

    def __init__(
        self,
        model: BaseModel,
        source: Source,
        out: str | Path,
        options: LargeOptions,
    ) -> None:
        self._logits: Tensor | None = None
        super().__init__(model, source, out, options)
        if self.is_blank:
            raise ValueError(
                f'{self.name}: has no valid pixel, and so no label'
            )

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

    def _make_outputs(self) -> LabelOutputs:
        count = self.network.num_classes
        classes = self.model.dataset_meta.get('classes') or range(count)
        if len(classes) != count:
            raise ValueError(
                f'the checkpoint names {len(classes)} classes, but the model '
                f'has {count}'
            )
        return LabelOutputs(
            self.paths,
            self.source,
            self.options,
            describe_run(self.model, self.name, self.options),
            self.image,
            self.grid,
            [str(name) for name in classes],
        )

    def _compute(
        self, streaming: Streaming, importance: ImportanceSink | None
    ) -> None:
        self._logits = streaming.classify(importance)
        self.outputs.take(self._logits)

    def _compute_again(self, streaming: Streaming) -> float:
        assert self._logits is not None
        return float((streaming.classify() - self._logits).abs().max())
