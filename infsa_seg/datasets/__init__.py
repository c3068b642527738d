# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Datasets, registered with mmsegmentation."""

from .camvid import CamVidDataset
from .checked import CheckedSegDataset
from .large_rasters import LargeRasters
from .scene_reader import SceneReader
from .scenes import Scene
from .seeded import CropShare, Draw, SeededDataset, SeededSampler
from .synthetic_scenes import LoadSyntheticScene, SyntheticScenes
from .transforms import DrawFlip, LoadWindow

__all__ = [
    'CamVidDataset',
    'CheckedSegDataset',
    'CropShare',
    'Draw',
    'DrawFlip',
    'LargeRasters',
    'LoadSyntheticScene',
    'LoadWindow',
    'Scene',
    'SceneReader',
    'SeededDataset',
    'SeededSampler',
    'SyntheticScenes',
]
