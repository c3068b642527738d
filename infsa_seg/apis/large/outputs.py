# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What becomes of the logits of a large image, band by band."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from infsa_seg.execution import Grid, Piece, classify, probabilities
from infsa_seg.ops import Rows, bands_of
from infsa_seg.raster import (
    GeoTiffWriter,
    PolygonWriter,
    ResampledReader,
    Window,
    class_map_type,
    output_nbytes,
    staged,
    write_qml,
)

from ..areas import count_areas
from ..pictures import Palette, write_overlay
from .options import PROBS, LargeOptions
from .raster_image import RasterImage, rows_at_once
from .sources import Labels, Source
from .tables import summarise, write_areas

# Height and width at most of the picture to look at.
_OVERVIEW = 2048
# Rows that a writer gathers, and what GDAL keeps (see GeoTiffWriter).
_TILE = 256
_GDAL_CACHE = 64 * 2**20
# What a PolygonWriter holds of a map that is not mere noise.
_POLYGONS = 256 * 2**20


class Outputs:
    """Writes the files of one image, and measures it where labels are known.

    Args:
        paths (dict): Of :func:`paths_of`.
        source (Source): What is segmented.
        options (LargeOptions): What to write, and how.
        run (dict): Of :func:`describe_run`; kept with the files.
        image (RasterImage): The part of the raster that is segmented.
        grid (Grid): Its tokens.
        num_classes (int): Channels of the logits.
        classes (sequence): Their names.
        palette (sequence): One (red, green, blue) for each.
        threshold (float): Of the foreground, where there is one class only.
        labels (Labels, optional): Class indices of the raster.
        strip (Rows, optional): Rows of pixels whose logits are to be kept.
    """

    def __init__(
        self,
        paths: dict[str, Path],
        source: Source,
        options: LargeOptions,
        run: dict[str, Any],
        image: RasterImage,
        grid: Grid,
        num_classes: int,
        classes: Sequence[str],
        palette: Palette,
        threshold: float = 0.5,
        labels: Labels | None = None,
        strip: Rows | None = None,
    ) -> None:
        self.paths, self.image, self.grid = paths, image, grid
        self.source, self.options, self.run = source, options, run
        self.classes, self.palette = list(classes), list(palette)
        self.threshold, self.labels, self.strip = threshold, labels, strip
        self.num_channels = num_classes
        self.num_classes = max(num_classes, 2)
        probs = options.probs
        self.probs = None if probs is None else np.dtype(PROBS[probs])
        self.dtype, self.nodata = class_map_type(self.num_classes)
        # Pixels of each class.
        self.counts = np.zeros(self.num_classes, np.int64)
        self.kept: list[Piece] = []
        self.areas: list[Tensor] = []
        meta = image.reader.meta
        step = -(-max(meta.height, meta.width) // _OVERVIEW)
        self._step = step
        shape = (-(-meta.height // step), -(-meta.width // step))
        self._overview: np.ndarray | None = None
        if 'overview' in paths:
            self._overview = np.full(shape, self.nodata, self.dtype)
        self._writers: dict[str, GeoTiffWriter] = {}
        self._polygons: PolygonWriter | None = None
        # Where files are written, until all of them are complete.
        self._places: dict[str, Path] = {}
        self._rows_written: dict[str, int] = {}
        # What stands where nothing is valid.
        self._blanks = {'mask': self.nodata, 'probs': 0, 'centrality': np.nan}

    @property
    def _has_pyramid(self) -> bool:
        wanted = self.options.pyramid
        return self.source.is_slide if wanted is None else wanted

    @property
    def pixel_bytes(self) -> int:
        """What is held per pixel of a band."""
        meta = self.image.reader.meta
        # The pixels as read, as numbers and normalised; classes; labels.
        held = meta.channels * meta.dtype.itemsize + 12 * self.image.channels
        held += 8 + 3 * self.dtype.itemsize + 9 * (self.labels is not None)
        if self.image.is_stretched:
            held += 16 * self.image.channels
        if self.probs is not None:
            held += 2 * self.num_channels * self.probs.itemsize
        return held

    @property
    def resident_bytes(self) -> int:
        """What is held whatever the bands."""
        meta = self.image.reader.meta
        per_pixel = self.dtype.itemsize
        if self.probs is not None:
            # With a copy as float32, which GDAL writes as float16.
            per_pixel += self.num_channels * 6
        held = _GDAL_CACHE + _TILE * meta.width * per_pixel
        if 'polygons' in self.paths:
            held += _POLYGONS
        if self.strip is not None:
            # Of both runs, and their difference.
            pixels = self.strip.num_rows * self.image.width
            held += 3 * 4 * self.num_channels * pixels
        if self._overview is not None:
            held += self._overview.size * (18 if meta.dtype == 'u1' else 48)
        return held

    @property
    def disk_bytes(self) -> int:
        """Size of the files before compression."""
        meta = self.image.reader.meta
        form = meta.height, meta.width
        size = output_nbytes(
            *form, 1, self.dtype, self._has_pyramid, self.options.cog
        )
        if self.probs is not None:
            size += output_nbytes(*form, self.num_channels, self.probs)
        if 'centrality' in self.paths:
            size += 4 * self.grid.rows * self.grid.columns
        return size

    def open(self, stack: ExitStack) -> None:
        """Make sure of every file; none appears before the stack closes.

        Raises:
            OSError: A file exists and ``overwrite`` is not set, or cannot be
                written.
        """
        meta, options = self.image.reader.meta, self.options
        overwrite = options.overwrite
        self._refuse_inputs()
        self._places = stack.enter_context(staged(self.paths, overwrite))
        tags = {
            'SOFTWARE': self.run['software'],
            'MODEL': json.dumps(self.run['model']),
            'OPTIONS': json.dumps(self.run['options']),
        }
        palette = [(r, g, b) for r, g, b in self.palette]
        kinds: dict[str, dict[str, Any]] = {
            'mask': dict(
                dtype=self.dtype,
                nodata=self.nodata,
                class_names=self.classes,
                palette=palette if self.dtype == np.uint8 else None,
                pyramid=self._has_pyramid,
                cog=options.cog,
                mpp=None if meta.georeference else meta.mpp,
            ),
            'probs': dict(channels=self.num_channels, dtype=self.probs),
            'centrality': dict(dtype=np.float32, nodata=np.nan),
        }
        for kind, settings in kinds.items():
            if kind not in self.paths:
                continue
            size, place = (meta.height, meta.width), meta.georeference
            if kind == 'centrality':
                size = (self.grid.rows, self.grid.columns)
                if place is not None:
                    top, left, *_ = self.image.window
                    patch = self.grid.patch_size
                    place = place.coarsened(top, left, patch)
            self._writers[kind] = stack.enter_context(
                GeoTiffWriter(
                    self._places[kind],
                    *size,
                    metadata=tags,
                    georeference=place,
                    **settings,
                )
            )

        if 'polygons' in self.paths:
            full = self.source.pyramid.meta
            self._polygons = stack.enter_context(
                PolygonWriter(
                    self._places['polygons'],
                    meta.width,
                    self.classes,
                    palette,
                    full.georeference,
                    slide=self.source.is_slide,
                    scale=(
                        full.height / meta.height,
                        full.width / meta.width,
                    ),
                    min_area=options.min_area,
                    simplify=options.simplify,
                    nodata=self.nodata,
                    mpp=self.source.full_mpp,
                    metadata=tags,
                )
            )

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

    def sink(self, rows: Rows, pieces: Iterator[Piece]) -> None:
        """Take the logits of a band."""
        shape = (rows.num_rows, self.image.width)
        classes = np.empty(shape, self.dtype)
        shares = None
        if self.probs is not None:
            shares = np.empty((*shape, self.num_channels), self.probs)
        for piece in self._keep(pieces):
            place = piece.place(rows.start)
            found = classify(piece.logits, self.threshold)
            classes[place] = found.cpu().numpy()
            if shares is not None:
                values = probabilities(piece.logits).cpu().numpy()
                if self.probs == np.uint8:
                    values = np.rint(255 * values)
                shares[place] = np.moveaxis(values, 0, 2)
        valid = self.image.read_valid(rows, Rows(0, self.image.width))
        if valid is not None:
            hidden = ~valid.numpy()
            classes[hidden] = self.nodata
            if shares is not None:
                shares[hidden] = 0
        top = self.image.window.row + rows.start
        known = classes[classes != self.nodata]
        self.counts += np.bincount(known, minlength=self.num_classes)
        self._measure(top, classes)
        self._decimate(top, classes)
        self._write('mask', top, classes)
        if self._polygons is not None:
            self._polygons.write(top, self._widen('mask', classes))
        if shares is not None:
            self._write('probs', top, shares)

    def sink_importance(self, rows: Rows, values: Tensor) -> None:
        """Take the importance of the tokens of a band; 1 is the average."""
        self._write('centrality', rows.start, values.numpy())

    def finish(self) -> None:
        """Fill up what was not valid; write what is not a raster."""
        for kind, writer in self._writers.items():
            self._skip_to(kind, writer.height)
        paths = self._places
        if 'areas' in paths:
            meta = self.image.reader.meta
            write_areas(paths['areas'], self.classes, self.counts, meta)
        if self._overview is not None:
            self._draw()
        if 'tissue' in paths:
            assert self.source.tissue is not None
            picture = Image.fromarray(self.source.tissue)
            picture.save(paths['tissue'], format='PNG')
        if 'style' in paths:
            palette = [(r, g, b) for r, g, b in self.palette]
            write_qml(paths['style'], self.classes, palette, self.nodata)
        if 'manifest' in paths:
            text = json.dumps(self._manifest(), indent=2)
            paths['manifest'].write_text(f'{text}\n', encoding='utf-8')

    def summary(self) -> dict[str, Any]:
        """What there is, and what was seen."""
        meta, damage = self.image.reader.meta, self.source.damage
        return {
            **summarise(self.classes, self.counts, meta.height * meta.width),
            'value_range': self.image.value_range,
            'bad_blocks': []
            if damage is None
            else [
                {'level': level, 'window': list(window)}
                for level, window in damage.bad_blocks
            ],
        }

    def _manifest(self) -> dict[str, Any]:
        meta = self.image.reader.meta
        return {
            **self.run,
            'size': [meta.height, meta.width],
            'mpp': meta.mpp,
            'nodata': self.nodata,
            'palette': [list(colour) for colour in self.palette],
            'files': {kind: path.name for kind, path in self.paths.items()},
            'summary': self.summary(),
        }

    def keep_only(self, rows: Rows, pieces: Iterator[Piece]) -> None:
        """Take the logits of a band, and keep those of the strip."""
        for _ in self._keep(pieces):
            pass

    def _keep(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self.strip is not None:
                height = piece.logits.shape[1]
                first = max(self.strip.start - piece.row, 0)
                last = min(self.strip.stop - piece.row, height)
                if first < last:
                    part = piece.logits[:, first:last].cpu().clone()
                    row = piece.row + first
                    self.kept.append(Piece(row, piece.col, part))
            yield piece

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

    def _measure(self, top: int, classes: np.ndarray) -> None:
        if self.labels is None:
            return
        left, width = self.image.window.col, self.image.width
        window = Window(top, left, len(classes), width)
        areas = count_areas(
            torch.from_numpy(classes.astype(np.int64)),
            torch.from_numpy(self.labels.read_labels(window).astype(np.int64)),
            self.num_classes,
        )
        if self.areas:
            areas = [a + b for a, b in zip(self.areas, areas, strict=True)]
        self.areas = areas

    def _decimate(self, top: int, classes: np.ndarray) -> None:
        if self._overview is None:
            return
        step, left = self._step, self.image.window.col
        rows = np.arange(-top % step, len(classes), step)
        cols = np.arange(-left % step, classes.shape[1], step)
        self._overview[np.ix_((top + rows) // step, (left + cols) // step)] = (
            classes[np.ix_(rows, cols)]
        )

    def _draw(self) -> None:
        assert self._overview is not None
        shape = self._overview.shape
        small = ResampledReader(self.source.pyramid, *shape)
        whole = Window(0, 0, *shape)
        picture = self.image.choose(small.read(whole))
        known = np.minimum(self._overview, self.num_classes)
        write_overlay(
            self._places['overview'],
            _to_bgr(picture, small.read_valid(whole)),
            known,
            [*self.classes, 'no data'],
            [*self.palette, (0, 0, 0)],
        )


def difference(one: list[Piece], other: list[Piece]) -> float:
    """The largest difference between logits of the same pixels.

    Args:
        one, other (list[Piece]): They cover the same pixels, cut differently.
    """
    assert one and other
    first = min(piece.row for piece in one)
    planes = []
    for pieces in (one, other):
        rows, cols = zip(*(p.place(first) for p in pieces), strict=True)
        plane = torch.empty(
            len(pieces[0].logits),
            max(part.stop for part in rows),
            max(part.stop for part in cols),
        )
        for piece in pieces:
            down, across = piece.place(first)
            plane[:, down, across] = piece.logits
        planes.append(plane)
    return float((planes[0] - planes[1]).abs().max())


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
