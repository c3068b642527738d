# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where pixels and their true classes come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from mmengine.model import BaseModel
from PIL import Image

from infsa_seg.datasets import SceneReader
from infsa_seg.raster import (
    RasterReader,
    TolerantReader,
    Window,
    open_raster,
)

from ..infer import parse_scene
from .options import LargeOptions
from .resolution import at_resolution
from .tissue import TissueReader, find_tissue, read_tissue


class Labels(Protocol):
    """True class indices, read by window."""

    def read_labels(self, window: Window) -> np.ndarray:
        """Integers (height, width); those of no class are ignored."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """What is to be segmented.

    Attributes:
        name (str): Of the input, as the user has it.
        reader (RasterReader): At the resolution that was asked for.
        pyramid (RasterReader): Of the full resolution, with its levels.
        tissue (ndarray, optional): Bool (rows, columns) for all of it; the
            rest is not valid.
        damage (TolerantReader, optional): Knows which blocks were damaged.
        full_mpp (tuple, optional): Micrometres per pixel of the full
            resolution, down and across.
        labels (Labels, optional): Its true classes, where they are known.
        notes (tuple[str]): What people should know before it starts.
    """

    name: str
    reader: RasterReader
    pyramid: RasterReader
    tissue: np.ndarray | None = None
    damage: TolerantReader | None = None
    full_mpp: tuple[float, float] | None = None
    labels: Labels | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_slide(self) -> bool:
        """Whether it has levels or a size, and no place on earth."""
        full = self.pyramid.meta
        sized = len(full.level_sizes) > 1 or self.full_mpp is not None
        return sized and full.georeference is None


@contextmanager
def open_source(
    model: BaseModel,
    source: str | Path | RasterReader,
    options: LargeOptions | None = None,
) -> Iterator[Source]:
    """Open what is to be segmented.

    Args:
        model (BaseModel): Its config says what a scene looks like.
        source (str | Path | RasterReader): A file, ``scene:SIZE``, or a
            reader, which stays open.
        options (LargeOptions, optional): How to read it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, or an option does not fit it.
    """
    options = options or LargeOptions()
    name = 'image' if isinstance(source, RasterReader) else str(source)
    with ExitStack() as stack:
        if isinstance(source, RasterReader):
            reader = source
        elif name.startswith('scene:'):
            reader = SceneReader(parse_scene(name, model.cfg)[1])
        else:
            reader = open_raster(name, options.nodata, reader=options.reader)
            stack.callback(reader.close)
        scene = reader if isinstance(reader, SceneReader) else None
        damage = None
        if options.tolerate_damage:
            reader = damage = TolerantReader(reader)
        pyramid = reader
        tissue = None
        with naming(name):
            reader, notes = at_resolution(
                reader, options.res, options.level, options.mpp_override
            )
            if options.tissue == 'auto':
                tissue = find_tissue(pyramid)
        if options.tissue not in (None, 'auto', 'none'):
            tissue = read_tissue(options.tissue, reader)
        if tissue is not None:
            reader = TissueReader(reader, tissue)
            if not tissue.any():
                notes.append('no tissue is there; nothing will be valid')
        mpp = pyramid.meta.mpp
        if options.mpp_override is not None:
            mpp = (options.mpp_override, options.mpp_override)
        size = (reader.meta.height, reader.meta.width)
        labels: Labels | None = None
        if scene is not None and scene.scene.size == size:
            labels = scene
        elif options.labels is not None:
            labels = stack.enter_context(
                open_labels(options.labels, stem_of(model, name), size)
            )
        yield Source(
            *(name, reader, pyramid, tissue, damage, mpp, labels),
            tuple(notes),
        )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say of which input a ValueError is, if it does not say so itself."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f'{name}: {error}') from error


def stem_of(model: BaseModel, name: str) -> str:
    """What the files of an input are named after."""
    if name.startswith('scene:'):
        return parse_scene(name, model.cfg)[0]
    return Path(name).stem


@contextmanager
def open_labels(
    folder: str | Path, stem: str, size: tuple[int, int]
) -> Iterator[Labels]:
    """The labels of an image.

    Args:
        folder (str | Path): Where NAME.png or NAME.tif lies.
        stem (str): NAME.
        size (tuple): (height, width) of the image.

    Raises:
        ValueError: There is no such file, or it does not fit the image.
    """
    for suffix in ('.png', '.tif', '.tiff'):
        path = Path(folder, f'{stem}{suffix}')
        if path.exists():
            break
    else:
        raise ValueError(f'{folder}: has neither {stem}.png nor {stem}.tif')
    with ExitStack() as stack:
        labels: _PngLabels | _TiffLabels
        if suffix == '.png':
            labels = _PngLabels(path)
        else:
            reader = stack.enter_context(open_raster(path, indexed=True))
            labels = _TiffLabels(reader)
        if labels.shape != size:
            raise ValueError(
                f'{path}: shape {labels.shape} for an image of {size}; '
                'one class index per pixel is needed'
            )
        yield labels


class _PngLabels:
    """A PNG of indices; those of a palette are not turned into colours."""

    def __init__(self, path: Path) -> None:
        with Image.open(path) as picture:
            self._labels = np.array(picture)
        self.shape = self._labels.shape

    def read_labels(self, window: Window) -> np.ndarray:
        return self._labels[window.slices]


class _TiffLabels:
    """The same in a TIFF, read by window."""

    def __init__(self, reader: RasterReader) -> None:
        self._reader = reader
        meta = reader.meta
        self.shape: tuple[int, ...] = (meta.height, meta.width)
        if meta.channels != 1:
            self.shape += (meta.channels,)

    def read_labels(self, window: Window) -> np.ndarray:
        return self._reader.read(window)[..., 0]
