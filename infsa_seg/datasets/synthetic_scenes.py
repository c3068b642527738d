# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A dataset without files: scenes that are drawn when they are asked for."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS, TRANSFORMS

from infsa_seg.ops.rows import Rows

from .scenes import PAINTERS, Scene
from .seeded import CropShare


@DATASETS.register_module()
class SyntheticScenes(BaseSegDataset):
    """Drawn scenes whose labels can depend on a cue far away.

    Equal arguments give equal scenes; training, validation and test data
    differ by ``seed``. The pipeline begins with :class:`LoadSyntheticScene`.

    Args:
        num_scenes (int): Length of the dataset.
        size (int | tuple[int, int]): Height and width in pixels.
        cue (str, optional): What decides the labels, ``None``, ``'scene'``
            (eight classes, both) or ``'legend'`` (four classes); see
            :class:`Scene`.
        seed (int): Names the series of scenes.
        patch (int): Unit of the cue in pixels, see :class:`Scene`.
        cue_repeats (int): Size of the cue in patches, see :class:`Scene`.
        label_cue (bool): Label a legend too, see :class:`Scene`. For training
            data only.
        **kwargs: ``pipeline``, ``test_mode`` and the like, as for
            :class:`mmseg.datasets.BaseSegDataset`.

    Raises:
        ValueError: There are no scenes, or as for :class:`Scene`.
    """

    METAINFO: ClassVar[dict[str, Any]] = {
        'classes': PAINTERS['scene'].CLASSES,
        'palette': PAINTERS['scene'].PALETTE,
    }

    # What LoadSyntheticScene is told of a draw.
    passes_share = True

    def __init__(
        self,
        num_scenes: int,
        size: int | tuple[int, int] = 128,
        cue: str | None = 'scene',
        seed: int = 0,
        patch: int = 8,
        cue_repeats: int = 4,
        label_cue: bool = False,
        **kwargs: Any,
    ) -> None:
        if num_scenes < 1:
            raise ValueError(f'num_scenes={num_scenes}: give 1 or more')
        height, width = (size, size) if isinstance(size, int) else size
        self.num_scenes = num_scenes
        self.first_scene = Scene(
            index=0,
            seed=seed,
            size=(height, width),
            cue=cue,
            patch=patch,
            cue_repeats=cue_repeats,
            label_cue=label_cue,
        )
        painter = PAINTERS[cue]
        metainfo = {'classes': painter.CLASSES, 'palette': painter.PALETTE}
        super().__init__(metainfo=metainfo, **kwargs)

    @classmethod
    def get_label_map(cls, new_classes: Any = None) -> None:
        """Map nothing: the classes follow the cue, not a file."""
        return None

    def load_data_list(self) -> list[dict[str, Any]]:
        """Describe every scene; ``img_path`` only names it, for outputs."""
        series = f'{self.first_scene.cue or "plain"}-{self.first_scene.seed}'
        return [
            {
                'img_path': f'{series}-{index:05d}.png',
                'scene': replace(self.first_scene, index=index),
                'label_map': self.label_map,
                'reduce_zero_label': self.reduce_zero_label,
                'seg_fields': [],
            }
            for index in range(self.num_scenes)
        ]

    def get_data_info(self, idx: int) -> dict[str, Any]:
        """What :class:`LoadSyntheticScene` needs to know of a scene."""
        info = super().get_data_info(idx)
        info['share'] = getattr(idx, 'share', None)
        return info


@TRANSFORMS.register_module()
class LoadSyntheticScene(BaseTransform):
    """Draw a scene, where other pipelines load an image and its mask.

    Required Keys:

    - scene (:class:`Scene`)
    - share (:class:`CropShare`, optional): Of the rows, draw only these.

    Modified Keys:

    - img (uint8, (H, W, 3), BGR as mmcv loads it)
    - img_shape
    - ori_shape
    - gt_seg_map (uint8, (H, W))
    - seg_fields

    Args:
        crop_size (tuple[int, int], optional): Draw a window of this height
            and width at a random place and nothing else, which is how to
            train on scenes that no memory holds. Most windows do not show
            the cue. Defaults to None, the whole scene.
    """

    # It can draw a part of what it would draw.
    reads_share = True

    def __init__(self, crop_size: tuple[int, int] | None = None) -> None:
        self.crop_size = crop_size

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Draw the scene in ``results``.

        Raises:
            ValueError: ``crop_size`` is larger than the scene.
        """
        scene = results['scene']
        row, col, height, width = self._draw_window(scene)
        share: CropShare | None = results.pop('share', None)
        rows = Rows(0, height)
        if share is not None:
            rows, height = share.to_read(height), share.within(height).num_rows
        rgb, label = scene.read(row + rows.start, col, rows.num_rows, width)
        results['img'] = np.ascontiguousarray(rgb[..., ::-1])
        results['img_shape'] = results['ori_shape'] = height, width
        results['gt_seg_map'] = label
        results['seg_fields'].append('gt_seg_map')
        return results

    def _draw_window(self, scene: Scene) -> tuple[int, ...]:
        if self.crop_size is None:
            return 0, 0, *scene.size
        spare = np.subtract(scene.size, self.crop_size)
        if spare.min() < 0:
            raise ValueError(
                f'crop_size={tuple(self.crop_size)} is larger than the '
                f'scenes of {scene.size} pixels; enlarge their size'
            )
        row, col = np.random.randint(spare + 1)
        return int(row), int(col), *self.crop_size

    def __repr__(self) -> str:
        return f'{type(self).__name__}(crop_size={self.crop_size})'
