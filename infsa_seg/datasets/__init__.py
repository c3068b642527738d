# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Datasets, registered with mmsegmentation."""

from .camvid import CamVidDataset
from .checked import CheckedSegDataset
from .large_rasters import LargeRasters
from .scene_reader import SceneReader
from .scenes import Scene
from .synthetic_scenes import LoadSyntheticScene, SyntheticScenes
from .transforms import LoadWindow

__all__ = [
    'CamVidDataset',
    'CheckedSegDataset',
    'LargeRasters',
    'LoadSyntheticScene',
    'LoadWindow',
    'Scene',
    'SceneReader',
    'SyntheticScenes',
]
