# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Transforms of labelled pictures, for classification."""

import math
from collections.abc import Sequence
from typing import Any

import mmcv
import numpy as np
import torch
from mmcv.transforms import BaseTransform, LoadImageFromFile
from mmengine import fileio
from mmengine.structures import BaseDataElement
from mmseg.registry import TRANSFORMS


class BrokenPictureError(ValueError):
    """A picture that cannot be decoded.

    Args:
        message (str): What is wrong with which file. Alone where the error
            comes from a worker of a data loader.
        path (str): The file.
    """

    def __init__(self, message: str, path: str = '') -> None:
        super().__init__(message)
        self.path = path


@TRANSFORMS.register_module()
class LoadPicture(LoadImageFromFile):
    """mmcv's ``LoadImageFromFile``, through Pillow and without mercy.

    A picture that is cut off is an error; OpenCV fills the rest with grey.
    The result is uint8 (height, width, 3), blue first, turned as EXIF says.

    Args:
        backend_args (dict, optional): Of mmengine's file backend.

    Raises:
        OSError: The file cannot be read.
        BrokenPictureError: It cannot be decoded.
    """

    def __init__(self, backend_args: dict | None = None) -> None:
        super().__init__(imdecode_backend='pillow', backend_args=backend_args)

    def transform(self, results: dict) -> dict:
        """Add ``img``, ``img_shape`` and ``ori_shape``."""
        path = results['img_path']
        content = fileio.get(path, backend_args=self.backend_args)
        try:
            image = mmcv.imfrombytes(content, 'color', backend='pillow')
        # Pillow's plugins have no closed set of errors.
        except Exception as error:
            reason = str(error).partition(' <')[0].partition('\n')[0]
            raise BrokenPictureError(
                f'{path}: is no picture, or a damaged one '
                f'({reason or type(error).__name__}); fetch it again, or set '
                'broken_list of the dataset to train without such',
                path,
            ) from error
        results['img'] = image
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


@TRANSFORMS.register_module()
class RandomResizedCrop(BaseTransform):
    """Cut out a random part of a picture and resize it, as for ImageNet.

    Args:
        scale (int | tuple[int, int]): Width and height of the result.
        crop_ratio_range (tuple[float, float]): Share of the area to keep.
            Defaults to (0.08, 1).
        aspect_ratio_range (tuple[float, float]): Width over height, drawn
            evenly in its logarithm. Defaults to (3/4, 4/3).
        max_attempts (int): Draws before the largest part in the middle with
            a permitted aspect is taken instead. Defaults to 10.
        interpolation (str): As for ``mmcv.imresize`` with Pillow, which
            averages where it shrinks. Defaults to 'bicubic'.
    """

    def __init__(
        self,
        scale: int | tuple[int, int],
        crop_ratio_range: tuple[float, float] = (0.08, 1.0),
        aspect_ratio_range: tuple[float, float] = (3 / 4, 4 / 3),
        max_attempts: int = 10,
        interpolation: str = 'bicubic',
    ) -> None:
        self.scale = (scale, scale) if isinstance(scale, int) else tuple(scale)
        self.crop_ratio_range = crop_ratio_range
        self.aspect_ratio_range = aspect_ratio_range
        self.max_attempts = max_attempts
        self.interpolation = interpolation

    def transform(self, results: dict) -> dict:
        """Replace ``img`` and ``img_shape``."""
        image = results['img']
        top, left, height, width = self.draw(*image.shape[:2])
        image = mmcv.imresize(
            image[top : top + height, left : left + width],
            self.scale,
            interpolation=self.interpolation,
            backend='pillow',
        )
        results['img'] = image
        results['img_shape'] = image.shape[:2]
        return results

    def draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw the top, left, height and width of a part, in pixels."""
        low, high = self.aspect_ratio_range
        for _ in range(self.max_attempts):
            area = height * width * np.random.uniform(*self.crop_ratio_range)
            aspect = math.exp(np.random.uniform(math.log(low), math.log(high)))
            part_width = round(math.sqrt(area * aspect))
            part_height = round(math.sqrt(area / aspect))
            if 0 < part_width <= width and 0 < part_height <= height:
                top = np.random.randint(height - part_height + 1)
                left = np.random.randint(width - part_width + 1)
                return top, left, part_height, part_width
        part_width = min(width, max(1, round(height * high)))
        part_height = min(height, max(1, round(width / low)))
        top = (height - part_height) // 2
        left = (width - part_width) // 2
        return top, left, part_height, part_width


@TRANSFORMS.register_module()
class RandAugment(BaseTransform):
    """kornia's RandAugment on one picture.

    kornia draws one set of operations for a batch, and so gets one picture at
    a time.

    Args:
        num_ops (int): Operations on each picture. Defaults to 2.
        magnitude (int): Their strength, 1 to 29. Defaults to 9.

    Raises:
        ImportError: kornia is not installed.
        ValueError: The magnitude is out of range.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9) -> None:
        require_kornia()
        from kornia.augmentation.auto import RandAugment as KorniaRandAugment

        self.num_ops = num_ops
        self.magnitude = magnitude
        self._augment = KorniaRandAugment(
            num_ops, magnitude, transformation_matrix_mode='skip'
        )

    def transform(self, results: dict) -> dict:
        """Replace ``img``, uint8 (height, width, 3), blue first."""
        picture = torch.from_numpy(results['img'][..., ::-1].copy())
        picture = picture.permute(2, 0, 1)[None] / 255
        picture = self._augment(picture)[0].clamp(0, 1) * 255
        picture = picture.round().to(torch.uint8).permute(1, 2, 0)
        results['img'] = np.ascontiguousarray(picture.numpy()[..., ::-1])
        return results


@TRANSFORMS.register_module()
class PackClsInputs(BaseTransform):
    """What a classifier wants of a picture and its label.

    ``inputs`` is the picture as a tensor (channels, height, width), and
    ``data_samples`` a data element with ``gt_label``, an int.

    Args:
        meta_keys (Sequence[str]): What the data element knows besides.
    """

    def __init__(
        self,
        meta_keys: Sequence[str] = (
            *('sample_idx', 'img_path', 'ori_shape', 'img_shape', 'flip'),
        ),
    ) -> None:
        self.meta_keys = tuple(meta_keys)

    def transform(self, results: dict) -> dict[str, Any]:
        """Pack ``img``, and ``gt_label`` if there is one."""
        image = np.ascontiguousarray(results['img'].transpose(2, 0, 1))
        sample = BaseDataElement(
            metainfo={k: results[k] for k in self.meta_keys if k in results}
        )
        if 'gt_label' in results:
            sample.gt_label = int(results['gt_label'])
        return {'inputs': torch.from_numpy(image), 'data_samples': sample}


def require_kornia() -> None:
    """Check that kornia is there.

    Raises:
        ImportError: It is not.
    """
    try:
        import kornia  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'kornia, which augments pictures and batches, is not installed; '
            "run pip install 'infsa_seg[pretrain]'"
        ) from error
