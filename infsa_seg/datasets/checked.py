# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A folder of images and a folder of masks, checked as they are read."""

import os.path as osp
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import mmcv
import numpy as np
from mmengine import fileio
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS


@DATASETS.register_module()
class CheckedSegDataset(BaseSegDataset):
    """Images and masks in folders, with mistakes named before they cost.

    Folders, suffixes and pairs are checked when the dataset is built; every
    mask when it is first read, in each process. Masks are read as class
    indices, palette PNGs included.

    Args:
        label_values (dict[int, int], optional): What values in the masks
            mean, where they are not class indices already:
            ``{255: 1}`` for masks of 0 and 255, ``{11: 255}`` to ignore 11.
        lazy_init (bool): Leave the folders alone until first use.
        **kwargs: As for :class:`mmseg.datasets.BaseSegDataset`; ``metainfo``
            must name the ``classes``, unless a subclass does.

    Raises:
        FileNotFoundError: A folder is missing or empty, nothing in it has the
            suffix, or ``ann_file`` is missing or names a missing image.
        ValueError: The classes are unknown, images have no masks, or the
            masks are JPEGs. On access: a mask is unreadable, has colours, or
            values that are no class.
    """

    def __init__(
        self,
        label_values: dict[int, int] | None = None,
        lazy_init: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(lazy_init=True, **kwargs)
        if not self.metainfo.get('classes'):
            raise ValueError(
                f'{type(self).__name__} does not know its classes; give '
                "metainfo=dict(classes=('first', 'second', ...))"
            )
        if label_values and self.reduce_zero_label:
            raise ValueError(
                'label_values cannot be combined with reduce_zero_label; '
                'say what 0 means in label_values, too'
            )
        self.label_values = label_values or {}
        # Upstream's map leads from the classes of a subclass to those that a
        # config picks among them; ours leads into it.
        picked = self.get_label_map(self.metainfo['classes']) or {}
        own = {v: picked.get(c, c) for v, c in self.label_values.items()}
        self.label_map = {**picked, **own} or None
        self._checked_masks: set[str] = set()
        self._warned_binary = False
        if not lazy_init:
            self.full_init()

    def load_data_list(self) -> list[dict[str, Any]]:
        """List the pairs of image and mask, and check what can be seen.

        The first mask is read here, so that a mistake in all of them shows
        before any worker starts.
        """
        images = self._find('img_path', 'img_suffix')
        if self.ann_file and not fileio.exists(
            self.ann_file, backend_args=self.backend_args
        ):
            raise FileNotFoundError(f'ann_file {self.ann_file} does not exist')
        data_list = super().load_data_list()
        lost = [
            d['img_path'] for d in data_list if d['img_path'] not in images
        ]
        if lost:
            raise FileNotFoundError(
                f'{self.ann_file} lists {_name_few(lost)}, which do not exist'
            )
        if self.data_prefix.get('seg_map_path') is not None:
            self._check_pairs(data_list)
            self._check_mask(data_list[0]['seg_map_path'])
        return data_list

    def prepare_data(self, idx: int) -> Any:
        """Run the pipeline on an item whose mask has been checked."""
        path = self.get_data_info(idx).get('seg_map_path')
        if path is not None and path not in self._checked_masks:
            self._check_mask(path)
        return super().prepare_data(idx)

    def _find(self, prefix: str, option: str) -> set[str]:
        """Paths of the files in a folder that have the right suffix."""
        folder, suffix = self.data_prefix[prefix], getattr(self, option)
        where = f'{folder} (data_root and data_prefix.{prefix})'
        if not fileio.isdir(folder, backend_args=self.backend_args):
            raise FileNotFoundError(f'there is no folder {where}')
        files = list(
            fileio.list_dir_or_file(
                folder,
                list_dir=False,
                recursive=True,
                backend_args=self.backend_args,
            )
        )
        if not files:
            raise FileNotFoundError(f'no files in {where}')
        found = {osp.join(folder, f) for f in files if f.endswith(suffix)}
        if not found:
            others = Counter(osp.splitext(f)[1] for f in files).most_common(5)
            raise FileNotFoundError(
                f'no file in {where} ends in {suffix!r}; those there end in '
                + ', '.join(f'{s!r} ({count})' for s, count in others)
                + f'; set {option}'
            )
        return found

    def _check_pairs(self, data_list: list[dict[str, Any]]) -> None:
        if self.seg_map_suffix.lower().endswith(('.jpg', '.jpeg')):
            raise ValueError(
                f'seg_map_suffix={self.seg_map_suffix!r}: JPEG does not keep '
                'class indices; convert the masks from their source to PNG'
            )
        masks = self._find('seg_map_path', 'seg_map_suffix')
        pairs = {d['seg_map_path']: d['img_path'] for d in data_list}
        alone = [image for mask, image in pairs.items() if mask not in masks]
        if alone:
            raise ValueError(
                f'no mask for {_name_few(alone)}: looked in '
                f'{self.data_prefix["seg_map_path"]} for the same names '
                f'ending in {self.seg_map_suffix!r}'
            )
        unused = masks - pairs.keys()
        # A list of names is there to pick a part.
        if unused and not self.ann_file:
            warnings.warn(
                f'no image for {_name_few(unused)}: these masks are not used',
                stacklevel=2,
            )

    def _check_mask(self, path: str) -> None:
        """Check shape and values of a mask.

        Raises:
            ValueError: It cannot be decoded, has colours or unknown values.
        """
        content = fileio.get(path, backend_args=self.backend_args)
        try:
            mask = mmcv.imfrombytes(content, 'unchanged', backend='pillow')
        except OSError as error:
            raise ValueError(f'mask {path} is unreadable: {error}') from error
        mask = mask.squeeze()
        if mask.ndim != 2:
            raise ValueError(
                f'mask {path} is a picture with {mask.shape[2]} channels; '
                'masks have one, of class indices: convert its colours'
            )
        values, counts = np.unique(mask, return_counts=True)
        classes = self._class_values()
        known = {*classes, *self.label_values, self.ignore_index}
        if self.reduce_zero_label:
            known.add(0)
        wrong = [
            f'{value} ({count} pixels)'
            for value, count in zip(values.tolist(), counts, strict=True)
            if value not in known
        ]
        if wrong:
            raise ValueError(
                f'mask {path} has values that are no class: '
                f'{_name_few(wrong)}. Classes are {classes[0]} to '
                f'{classes[-1]}, {self.ignore_index} is ignored; say with '
                'label_values what others mean, e.g. '
                f'label_values={{{wrong[0].split()[0]}: 255}} to ignore'
            )
        if set(values) == {0, 255} and 255 not in self.label_values:
            self._warn_of_binary(path)
        self._checked_masks.add(path)

    def _class_values(self) -> range:
        """Values in the masks that are classes, before any mapping."""
        # Masks are in the classes of the subclass, if a config picks some.
        classes = self.METAINFO.get('classes') or self.metainfo['classes']
        first = int(self.reduce_zero_label)
        return range(first, first + len(classes))

    def _warn_of_binary(self, path: str) -> None:
        # With more classes this is a mask of class 0 beside ignored pixels.
        if len(self._class_values()) > 2 or self._warned_binary:
            return
        self._warned_binary = True
        warnings.warn(
            f'mask {path} has the values 0 and 255 only, and 255 is ignored '
            'in training; if it stands for the second class, set '
            'label_values={255: 1}',
            stacklevel=2,
        )


def _name_few(items: Iterable[str], few: int = 3) -> str:
    """Enumerate the first items in order, and count the rest."""
    items = sorted(items) if isinstance(items, set) else list(items)
    rest = f' and {len(items) - few} more' if len(items) > few else ''
    return ', '.join(items[:few]) + rest
