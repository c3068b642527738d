# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pictures of predictions during validation and test."""

from collections.abc import Sequence
from pathlib import Path

import mmcv
from mmengine.runner import Runner
from mmseg.engine.hooks import SegVisualizationHook
from mmseg.registry import HOOKS
from mmseg.structures import SegDataSample


@HOOKS.register_module()
class InputVisualizationHook(SegVisualizationHook):
    """Draws predictions on the image that the network was given.

    Upstream reads the image again from its file; scenes drawn on the fly and
    windows of large rasters have none.
    """

    def _after_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict,
        outputs: Sequence[SegDataSample],
        mode: str = 'val',
    ) -> None:
        if not self.draw or mode == 'train':
            return
        if not self.every_n_inner_iters(batch_idx, self.interval):
            return
        for image, output in zip(data_batch['inputs'], outputs, strict=True):
            height, width = output.pred_sem_seg.shape
            # The pipeline packs BGR as (channels, rows, columns).
            image = image.numpy().transpose(1, 2, 0)[..., ::-1]
            self._visualizer.add_datasample(
                f'{mode}_{Path(output.img_path).stem}',
                mmcv.imresize(image, (width, height)),
                data_sample=output,
                show=self.show,
                wait_time=self.wait_time,
                step=runner.iter,
            )
