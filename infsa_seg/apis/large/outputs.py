# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The files of a large image, and what they have in common."""

from __future__ import annotations

import abc
import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from infsa_seg.execution import Grid
from infsa_seg.ops import bands_of
from infsa_seg.raster import (
    GeoTiffWriter,
    RasterMeta,
    ResampledReader,
    Window,
    staged,
)

from .options import LargeOptions
from .raster_image import RasterImage, rows_at_once
from .sources import Source

# Height and width at most of the picture to look at.
OVERVIEW = 2048
# Rows that a writer gathers, and what GDAL keeps (see GeoTiffWriter).
TILE = 256
_GDAL_CACHE = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to become of one image, whatever the model.

    Attributes:
        paths (dict): Of :func:`paths_of`.
        source (Source): The image.
        options (LargeOptions): What to write, and how.
        run (dict): Of :func:`describe_run`; kept with the files.
        image (RasterImage): The part of the raster that is computed.
        grid (Grid): Its tokens.
    """

    paths: dict[str, Path]
    source: Source
    options: LargeOptions
    run: dict[str, Any]
    image: RasterImage
    grid: Grid


class Outputs(abc.ABC):
    """Writes the files of one image.

    Args:
        task (Task): Which files, of what.
    """

    def __init__(self, task: Task) -> None:
        self.paths, self.source = task.paths, task.source
        self.options, self.run = task.options, task.run
        self.image, self.grid = task.image, task.grid
        self.areas: list[Tensor] = []
        self._writers: dict[str, GeoTiffWriter] = {}
        # Where files are written, until all of them are complete.
        self._places: dict[str, Path] = {}
        self._rows_written: dict[str, int] = {}
        # What stands where nothing is valid.
        self._blanks: dict[str, float] = {'centrality': np.nan}

    @property
    def meta(self) -> RasterMeta:
        """Of the raster, at the resolution of the run."""
        return self.image.reader.meta

    @property
    def tags(self) -> dict[str, str]:
        """What is told within files of what they were computed from."""
        return {
            'SOFTWARE': self.run['software'],
            'MODEL': json.dumps(self.run['model']),
            'OPTIONS': json.dumps(self.run['options']),
        }

    @property
    def pixel_bytes(self) -> int:
        """What is held per pixel of a band."""
        # The pixels as read, as numbers and normalised.
        held = self.meta.channels * self.meta.dtype.itemsize
        held += 12 * self.image.channels
        if self.image.is_stretched:
            held += 16 * self.image.channels
        return held

    @property
    def resident_bytes(self) -> int:
        """What is held whatever the bands."""
        return _GDAL_CACHE

    @property
    def disk_bytes(self) -> int:
        """Size of the files before compression."""
        if 'centrality' not in self.paths:
            return 0
        return 4 * self.grid.rows * self.grid.columns

    def open(self, stack: ExitStack) -> None:
        """Make sure of every file; none appears before the stack closes.

        Raises:
            OSError: A file exists and ``overwrite`` is not set, or cannot be
                written.
        """
        self._refuse_inputs()
        overwrite = self.options.overwrite
        self._places = stack.enter_context(staged(self.paths, overwrite))
        for kind, settings in self._rasters().items():
            self._writers[kind] = stack.enter_context(
                GeoTiffWriter(
                    self._places[kind], metadata=self.tags, **settings
                )
            )

    def _rasters(self) -> dict[str, dict[str, Any]]:
        """By kind, what a GeoTiffWriter is to be made with."""
        if 'centrality' not in self.paths:
            return {}
        place, patch = self.meta.georeference, self.grid.patch_size
        if place is not None:
            top, left, *_ = self.image.window
            place = place.coarsened(top, left, patch)
        return {
            'centrality': dict(
                height=self.grid.rows,
                width=self.grid.columns,
                georeference=place,
                dtype=np.float32,
                nodata=np.nan,
            )
        }

    def _refuse_inputs(self) -> None:
        """A file that is read must not be replaced."""
        read = [self.source.name, self.options.tissue]
        for path in self.paths.values():
            for name in read:
                if (
                    name is not None
                    and path.exists()
                    and Path(name).exists()
                    and path.samefile(name)
                ):
                    raise ValueError(
                        f'{path}: is an input itself; give another --out'
                    )

    def sink_importance(self, row: int, values: Tensor) -> None:
        """Take the importance of the tokens of a band; 1 is the average."""
        self._write('centrality', row, values.numpy())

    def finish(self) -> None:
        """Fill up what was not valid; write what is not a raster."""
        for kind, writer in self._writers.items():
            self._skip_to(kind, writer.height)
        paths = self._places
        if 'overview' in paths:
            self._draw(paths['overview'])
        if 'tissue' in paths:
            assert self.source.tissue is not None
            picture = Image.fromarray(self.source.tissue)
            picture.save(paths['tissue'], format='PNG')
        if 'manifest' in paths:
            write_json(paths['manifest'], self._manifest())

    @abc.abstractmethod
    def _draw(self, path: Path) -> None:
        """Write a picture to look at."""

    def summary(self) -> dict[str, Any]:
        """What there is, and what was seen."""
        damage = self.source.damage
        return {
            'value_range': self.image.value_range,
            'bad_blocks': []
            if damage is None
            else [
                {'level': level, 'window': list(window)}
                for level, window in damage.bad_blocks
            ],
        }

    def _manifest(self) -> dict[str, Any]:
        return {
            **self.run,
            'size': [self.meta.height, self.meta.width],
            'mpp': self.meta.mpp,
            'files': {kind: path.name for kind, path in self.paths.items()},
            'summary': self.summary(),
        }

    def _write(self, kind: str, row: int, pixels: np.ndarray) -> None:
        """Write rows of the valid part, and what lies around and above."""
        self._skip_to(kind, row)
        pixels = self._widen(kind, pixels)
        self._writers[kind].write(row, pixels)
        self._rows_written[kind] = row + len(pixels)

    def _widen(self, kind: str, pixels: np.ndarray) -> np.ndarray:
        """Rows of the valid part as rows of the whole raster."""
        if pixels.shape[1] == self._writers[kind].width:
            return pixels
        left = self.image.window.col
        full = self._blank_rows(kind, len(pixels))
        full = full.reshape(*full.shape[:2], *pixels.shape[2:])
        full[:, left : left + pixels.shape[1]] = pixels
        return full

    def _skip_to(self, kind: str, row: int) -> None:
        """Write rows without a valid pixel, up to some row."""
        done = self._rows_written.get(kind, 0)
        row_bytes = self._blank_rows(kind, 1).nbytes
        for gap in bands_of(row - done, rows_at_once(row_bytes)):
            blank = self._blank_rows(kind, gap.num_rows)
            self._writers[kind].write(done + gap.start, blank)
        self._rows_written[kind] = row

    def _blank_rows(self, kind: str, num_rows: int) -> np.ndarray:
        writer = self._writers[kind]
        shape = (num_rows, writer.width, writer.channels)
        return np.full(shape, self._blanks[kind], writer.dtype)

    def _thumbnail(
        self, height: int, width: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The image at another size, BGR of eight bits, and what is valid."""
        small = ResampledReader(self.source.pyramid, height, width)
        whole = Window(0, 0, height, width)
        picture = self.image.choose(small.read(whole))
        valid = small.read_valid(whole)
        return _to_bgr(picture, valid), valid


def write_json(path: Path, content: Any) -> None:
    """Write what people and programs read."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(f'{text}\n', encoding='utf-8')


def _to_bgr(picture: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Any pixels as a picture of eight bits; valid ones set the scale."""
    if picture.shape[2] < 3:
        picture = np.repeat(picture[..., :1], 3, 2)
    picture = picture[..., 2::-1]
    if picture.dtype != np.uint8:
        known = picture if valid is None else picture[valid]
        low, high = np.percentile(known, (2, 98)) if known.size else (0, 1)
        scaled = (picture - np.float32(low)) * (255 / max(high - low, 1e-12))
        picture = np.nan_to_num(scaled).clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(picture)
