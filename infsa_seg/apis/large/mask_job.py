# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One large image from its file to its class map."""

from __future__ import annotations

from mmengine.model import BaseModel

from infsa_seg.execution import ImportanceSink, Streaming
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import Rows

from .job import LargeJob
from .mask_outputs import MaskOutputs, difference
from .outputs import Task


class MaskJob(LargeJob):
    """Segments an image; see :class:`LargeJob`."""

    kind = 'mask'
    outputs: MaskOutputs

    @staticmethod
    def network_of(model: BaseModel) -> SegmentorNetwork:
        """See :class:`LargeJob`."""
        return SegmentorNetwork(model)

    def _make_outputs(self, task: Task) -> MaskOutputs:
        meta = self.model.dataset_meta
        head = self.model.decode_head
        palette = self.options.palette or meta['palette']
        classes = meta['classes']
        if len(palette) != len(classes):
            raise ValueError(
                f'the palette has {len(palette)} colours for {len(classes)} '
                'classes'
            )
        return MaskOutputs(
            task,
            self.network.num_classes,
            classes,
            palette,
            getattr(head, 'threshold', None) or 0.5,
            self._choose_strip(),
        )

    def _choose_strip(self) -> Rows | None:
        """Rows of pixels in the middle, to compare."""
        if self.options.verify is None or self.is_blank:
            return None
        num_rows = min(self.options.verify, self.grid.height)
        first = (self.grid.height - num_rows) // 2
        return Rows(first, first + num_rows)

    def _compute(
        self, streaming: Streaming, importance: ImportanceSink | None
    ) -> None:
        streaming.run(self.outputs.sink, importance)

    def _compute_again(self, streaming: Streaming) -> float:
        outputs, strip = self.outputs, self.outputs.strip
        assert strip is not None
        first, outputs.kept = outputs.kept, []
        patch = self.grid.patch_size
        streaming.run(
            outputs.keep_only,
            wanted=Rows(strip.start // patch, -(-strip.stop // patch)),
        )
        return difference(first, outputs.kept)

    def _doubts(self) -> list[str]:
        doubts = super()._doubts()
        only = self.outputs.summary()['one_class']
        if only is not None:
            doubts.append(
                f'all of it is {only!r}; are the channels and the values '
                'those that the model was trained on?'
            )
        return doubts
