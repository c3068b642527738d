# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Datasets, registered with mmsegmentation."""

from .batch_augments import BatchRandomErasing, MixUpCutMix
from .camvid import CamVidDataset
from .checked import CheckedSegDataset
from .imagenet import ImageNet
from .large_rasters import LargeRasters
from .pictures import (
    BrokenPictureError,
    LoadPicture,
    PackClsInputs,
    RandAugment,
    RandomResizedCrop,
)
from .samplers import RepeatedAugSampler
from .scene_reader import SceneReader
from .scenes import Scene
from .seeded import CropShare, Draw, SeededDataset, SeededSampler
from .synthetic_scenes import LoadSyntheticScene, SyntheticScenes
from .transforms import DrawFlip, LoadWindow

__all__ = [
    'BatchRandomErasing',
    'BrokenPictureError',
    'CamVidDataset',
    'CheckedSegDataset',
    'CropShare',
    'Draw',
    'DrawFlip',
    'ImageNet',
    'LargeRasters',
    'LoadPicture',
    'LoadSyntheticScene',
    'LoadWindow',
    'MixUpCutMix',
    'PackClsInputs',
    'RandAugment',
    'RandomResizedCrop',
    'RepeatedAugSampler',
    'Scene',
    'SceneReader',
    'SeededDataset',
    'SeededSampler',
    'SyntheticScenes',
]
