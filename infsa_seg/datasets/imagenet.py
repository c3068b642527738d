# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""ImageNet and everything that is laid out like it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.dataset import BaseDataset
from mmengine.logging import print_log
from mmseg.registry import DATASETS

from .pictures import BrokenPictureError

SUFFIXES = ('.jpeg', '.jpg', '.png', '.bmp', '.webp', '.ppm', '.tif', '.tiff')


@DATASETS.register_module()
class ImageNet(BaseDataset):
    """Pictures in one folder for each class, or in one folder with a list.

    Below ``data_root``:

    * ``train/<class>/**/*.JPEG`` and ``val/<class>/**/*.JPEG``;
    * or ``val/*.JPEG`` and, as ``ann_file``, a list of names and classes,
      one picture a line: ``ILSVRC2012_val_00000001.JPEG 65``.

    The classes are the sorted names of the folders in ``class_folder``, which
    is that of the training pictures whatever the split. A folder or a line
    may give the index of a class instead of its name, as ImageNet-V2 does.

    Args:
        data_root (str): Folder that the others are in.
        data_prefix (dict): ``img_path``, the folder of this split.
            Defaults to ``dict(img_path='train')``.
        ann_file (str): The list, if there is one.
        class_folder (str): Folder that names the classes. Not needed where
            ``metainfo=dict(classes=...)`` does, or all names are indices.
            Defaults to ``'train'``.
        broken_list (str, optional): File of pictures that cannot be decoded.
            Those in it are left out. In training, one that turns up is
            written there and another picture takes its place; without a
            list, and in testing, it is an error.
        max_broken (int): Pictures in that list after which training stops.
            Defaults to 100.
        lazy_init (bool): Leave the folders alone until first use.
        **kwargs: As for mmengine's ``BaseDataset``.

    Raises:
        FileNotFoundError: A folder or the list is missing, or a class has no
            picture.
        ValueError: A folder or a line is of no class. On access: a picture
            cannot be decoded, or there were more than ``max_broken``.
    """

    def __init__(
        self,
        data_root: str = '',
        data_prefix: dict | None = None,
        ann_file: str = '',
        class_folder: str = 'train',
        broken_list: str | None = None,
        max_broken: int = 100,
        lazy_init: bool = False,
        **kwargs: Any,
    ) -> None:
        self.class_folder = class_folder
        self.broken_list = broken_list
        self.max_broken = max_broken
        super().__init__(
            data_root=data_root,
            data_prefix=data_prefix or dict(img_path='train'),
            ann_file=ann_file,
            lazy_init=lazy_init,
            **kwargs,
        )

    def load_data_list(self) -> list[dict[str, Any]]:
        """List the pictures with their labels, those known broken excepted."""
        folder = self.data_prefix['img_path']
        _need_folder(folder, 'data_root and data_prefix.img_path')
        if self.ann_file:
            found = list(_read_list(self.ann_file, folder))
        else:
            found = list(_read_folders(folder))
        classes = self._find_classes({item.name for item in found})
        self._metainfo['classes'] = classes
        labels = {name: index for index, name in enumerate(classes)}
        for index, name in enumerate(classes):
            # A line of a file of classes may go on after the name.
            labels.setdefault(name.split()[0], index)
        left_out = self._read_broken()
        data_list = []
        for item in found:
            label = labels.get(item.name)
            if label is None:
                label = _as_index(item, classes)
            data_list += [
                {'img_path': path, 'gt_label': label}
                for path in item.paths
                if path not in left_out
            ]
        return data_list

    def prepare_data(self, idx: int) -> Any:
        """Run the pipeline; None where a broken picture is passed over."""
        try:
            return super().prepare_data(idx)
        except BrokenPictureError as error:
            if self.test_mode or self.broken_list is None:
                raise
            self._note_broken(error)
            return None

    def get_cat_ids(self, idx: int) -> list[int]:
        """The label of a picture, as mmengine's wrappers ask for it."""
        return [self.get_data_info(idx)['gt_label']]

    def _find_classes(self, names: set[str]) -> tuple[str, ...]:
        given = self._metainfo.get('classes')
        if isinstance(given, str):
            raise FileNotFoundError(
                f'{given}: no such file of classes (metainfo.classes)'
            )
        if given:
            return tuple(given)
        source = os.path.join(self.data_root, self.class_folder)
        if os.path.isdir(source):
            return tuple(_sorted_folders(source))
        if names and all(name.isdecimal() for name in names):
            return tuple(map(str, range(max(map(int, names)) + 1)))
        raise FileNotFoundError(
            f'{source}: no such folder to name the classes; set class_folder, '
            'or metainfo=dict(classes=...)'
        )

    def _read_broken(self) -> set[str]:
        if self.broken_list is None or not os.path.exists(self.broken_list):
            return set()
        return set(Path(self.broken_list).read_text().splitlines())

    def _note_broken(self, error: BrokenPictureError) -> None:
        """Add to the list, which all processes share."""
        assert self.broken_list is not None
        path = Path(self.broken_list)
        path.parent.mkdir(parents=True, exist_ok=True)
        known = self._read_broken()
        if error.path not in known:
            with path.open('a') as file:
                file.write(f'{error.path}\n')
            print_log(f'passed over: {error}', level=logging.WARNING)
        # Others may have written meanwhile.
        count = len(self._read_broken())
        if count > self.max_broken:
            raise ValueError(
                f'{self.broken_list}: lists {count} broken pictures, more '
                f'than max_broken={self.max_broken}; the last is {error.path}'
            )


class _Item(NamedTuple):
    """Pictures of one class.

    Args:
        name: The class, by name or index.
        paths: The pictures.
        where: What to name if there is no such class.
    """

    name: str
    paths: Sequence[str]
    where: str


def _as_index(item: _Item, classes: Sequence[str]) -> int:
    if item.name.isdecimal() and int(item.name) < len(classes):
        return int(item.name)
    raise ValueError(
        f'{item.where}: {item.name!r} is none of the {len(classes)} classes, '
        f'{", ".join(classes[:3])}{", ..." if len(classes) > 3 else ""}, nor '
        'the index of one'
    )


def _read_folders(folder: str) -> Iterable[_Item]:
    names = _sorted_folders(folder)
    if not names:
        raise FileNotFoundError(
            f'{folder}: has no folders; there should be one for each class, '
            'or set ann_file'
        )
    for name in names:
        path = os.path.join(folder, name)
        pictures = sorted(_find_pictures(path))
        if not pictures:
            raise FileNotFoundError(
                f'{path}: no picture of this class; names should end in '
                f'{", ".join(SUFFIXES)}'
            )
        yield _Item(name, pictures, path)


def _read_list(ann_file: str, folder: str) -> Iterable[_Item]:
    if not os.path.isfile(ann_file):
        raise FileNotFoundError(f'{ann_file}: no such file (ann_file)')
    there = {os.path.relpath(p, folder) for p in _find_pictures(folder)}
    lines = Path(ann_file).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f'{ann_file}, line {number}'
        # Tiny ImageNet's has boxes behind the class.
        name, *rest = line.split()
        if not rest:
            raise ValueError(
                f'{where}: {line!r} is not a picture and its class'
            )
        if os.path.normpath(name) not in there:
            raise FileNotFoundError(
                f'{where}: {os.path.join(folder, name)} does not exist'
            )
        yield _Item(rest[0], [os.path.join(folder, name)], where)


def _sorted_folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in entries
            if entry.is_dir() and not entry.name.startswith('.')
        ]
    if names and all(name.isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)


def _find_pictures(folder: str) -> Iterable[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.lower().endswith(SUFFIXES) and not name.startswith('.'):
                yield os.path.join(parent, name)


def _need_folder(folder: str, settings: str) -> None:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f'{folder}: no such folder ({settings})')
