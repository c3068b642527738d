# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""CamVid: road scenes from a driver's view."""

from typing import Any, ClassVar

from mmseg.registry import DATASETS

from .checked import CheckedSegDataset


@DATASETS.register_module()
class CamVidDataset(CheckedSegDataset):
    """CamVid with the usual 11 classes; label 11, void, is ignored.

    Below ``data_root``, images are ``img/{train,val,test}/NAME.jpg`` and masks
    of class indices ``ann/{train,val,test}/NAME.png``; ``data_prefix`` picks
    a split.

    Args:
        **kwargs: As for :class:`CheckedSegDataset`.
    """

    METAINFO: ClassVar[dict[str, Any]] = {
        'classes': (
            'sky',
            'building',
            'pole',
            'road',
            'pavement',
            'tree',
            'sign',
            'fence',
            'car',
            'pedestrian',
            'bicyclist',
        ),
        'palette': [
            [128, 128, 128],
            [128, 0, 0],
            [192, 192, 128],
            [128, 64, 128],
            [0, 0, 192],
            [128, 128, 0],
            [192, 128, 128],
            [64, 64, 128],
            [64, 0, 128],
            [64, 64, 0],
            [0, 128, 192],
        ],
    }

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('label_values', {11: 255})
        super().__init__(**kwargs)
