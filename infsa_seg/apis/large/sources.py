# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where pixels and their true classes come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from mmseg.models import BaseSegmentor
from PIL import Image

from infsa_seg.datasets import SceneReader
from infsa_seg.raster import RasterReader, Window, open_raster

from ..infer import parse_scene


class Labels(Protocol):
    """True class indices, read by window."""

    def read_labels(self, window: Window) -> np.ndarray:
        """Integers (height, width); those of no class are ignored."""
        ...


@contextmanager
def open_source(
    model: BaseSegmentor,
    source: str | Path | RasterReader,
    nodata: float | None = None,
) -> Iterator[tuple[str, RasterReader]]:
    """A name for what is to be segmented, and its reader.

    Args:
        model (BaseSegmentor): Its config says what a scene looks like.
        source (str | Path | RasterReader): A file, ``scene:SIZE``, or a
            reader, which stays open.
        nodata (float, optional): Of a file, in place of its own.
    """
    if isinstance(source, RasterReader):
        yield 'image', source
        return
    name = str(source)
    if name.startswith('scene:'):
        yield name, SceneReader(parse_scene(name, model.cfg)[1])
        return
    with open_raster(name, nodata) as reader:
        yield name, reader


def stem_of(model: BaseSegmentor, name: str) -> str:
    """What the files of an input are named after."""
    if name.startswith('scene:'):
        return parse_scene(name, model.cfg)[0]
    return Path(name).stem


def open_labels(
    folder: str | Path | None, stem: str, reader: RasterReader
) -> Labels | None:
    """The labels of an image, if they are known.

    Args:
        folder (str | Path, optional): Where NAME.png or NAME.tif lies. Scenes
            know their labels themselves.
        stem (str): NAME.
        reader (RasterReader): The image.

    Raises:
        ValueError: There is no such file, or it does not fit the image.
    """
    if isinstance(reader, SceneReader):
        return reader
    if folder is None:
        return None
    size = (reader.meta.height, reader.meta.width)
    for suffix in ('.png', '.tif', '.tiff'):
        path = Path(folder, f'{stem}{suffix}')
        if path.exists():
            labels = _PngLabels(path) if suffix == '.png' else _Tiff(path)
            if labels.shape != size:
                raise ValueError(
                    f'{path}: shape {labels.shape} for an image of {size}; '
                    'one class index per pixel is needed'
                )
            return labels
    raise ValueError(f'{folder}: has neither {stem}.png nor {stem}.tif')


class _PngLabels:
    """A PNG of indices; those of a palette are not turned into colours."""

    def __init__(self, path: Path) -> None:
        with Image.open(path) as picture:
            self._labels = np.array(picture)
        self.shape = self._labels.shape

    def read_labels(self, window: Window) -> np.ndarray:
        return self._labels[window.slices]


class _Tiff:
    """The same in a TIFF, read by window."""

    def __init__(self, path: Path) -> None:
        self._reader = open_raster(path, indexed=True)
        meta = self._reader.meta
        self.shape: tuple[int, ...] = (meta.height, meta.width)
        if meta.channels != 1:
            self.shape += (meta.channels,)

    def read_labels(self, window: Window) -> np.ndarray:
        return self._reader.read(window)[..., 0]
