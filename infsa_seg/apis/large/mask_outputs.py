# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What becomes of the logits of a large image, band by band."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infsa_seg.execution import Piece, classify, probabilities
from infsa_seg.ops import Rows
from infsa_seg.raster import (
    PolygonWriter,
    Window,
    class_map_type,
    output_nbytes,
    write_qml,
)

from ..areas import count_areas
from ..pictures import Palette, write_overlay
from .options import PROBS
from .outputs import OVERVIEW, TILE, Outputs, Task
from .tables import summarise, write_areas

# What a PolygonWriter holds of a map that is not mere noise.
_POLYGONS = 256 * 2**20


class MaskOutputs(Outputs):
    """Writes a class map, and measures it where labels are known.

    Args:
        task (Task): As for :class:`Outputs`.
        num_classes (int): Channels of the logits.
        classes (sequence): Their names.
        palette (sequence): One (red, green, blue) for each.
        threshold (float): Of the foreground, where there is one class only.
        strip (Rows, optional): Rows of pixels whose logits are to be kept.
    """

    def __init__(
        self,
        task: Task,
        num_classes: int,
        classes: Sequence[str],
        palette: Palette,
        threshold: float = 0.5,
        strip: Rows | None = None,
    ) -> None:
        super().__init__(task)
        self.classes = list(classes)
        self.palette = [(r, g, b) for r, g, b in palette]
        self.threshold, self.strip = threshold, strip
        self.num_channels = num_classes
        self.num_classes = max(num_classes, 2)
        probs = self.options.probs
        self.probs = None if probs is None else np.dtype(PROBS[probs])
        self.dtype, self.nodata = class_map_type(self.num_classes)
        self._blanks |= {'mask': self.nodata, 'probs': 0}
        # Pixels of each class.
        self.counts = np.zeros(self.num_classes, np.int64)
        self.kept: list[Piece] = []
        height, width = self.meta.height, self.meta.width
        self._step = step = -(-max(height, width) // OVERVIEW)
        self._overview: np.ndarray | None = None
        if 'overview' in self.paths:
            shape = (-(-height // step), -(-width // step))
            self._overview = np.full(shape, self.nodata, self.dtype)
        self._polygons: PolygonWriter | None = None

    @property
    def _has_pyramid(self) -> bool:
        wanted = self.options.pyramid
        return self.source.is_slide if wanted is None else wanted

    @property
    def pixel_bytes(self) -> int:
        """What is held per pixel of a band."""
        # Classes; labels.
        held = 8 + 3 * self.dtype.itemsize
        held += 9 * (self.source.labels is not None)
        if self.probs is not None:
            held += 2 * self.num_channels * self.probs.itemsize
        return super().pixel_bytes + held

    @property
    def resident_bytes(self) -> int:
        """What is held whatever the bands."""
        per_pixel = self.dtype.itemsize
        if self.probs is not None:
            # With a copy as float32, which GDAL writes as float16.
            per_pixel += self.num_channels * 6
        held = super().resident_bytes + TILE * self.meta.width * per_pixel
        if 'polygons' in self.paths:
            held += _POLYGONS
        if self.strip is not None:
            # Of both runs, and their difference.
            pixels = self.strip.num_rows * self.image.width
            held += 3 * 4 * self.num_channels * pixels
        if self._overview is not None:
            wide = self.meta.dtype != 'u1'
            held += self._overview.size * (48 if wide else 18)
        return held

    @property
    def disk_bytes(self) -> int:
        """Size of the files before compression."""
        form = self.meta.height, self.meta.width
        size = output_nbytes(
            *form, 1, self.dtype, self._has_pyramid, self.options.cog
        )
        if self.probs is not None:
            size += output_nbytes(*form, self.num_channels, self.probs)
        return super().disk_bytes + size

    def open(self, stack: ExitStack) -> None:
        """See :class:`Outputs`."""
        super().open(stack)
        if 'polygons' not in self.paths:
            return
        meta, full = self.meta, self.source.pyramid.meta
        self._polygons = stack.enter_context(
            PolygonWriter(
                self._places['polygons'],
                meta.width,
                self.classes,
                self.palette,
                full.georeference,
                slide=self.source.is_slide,
                scale=(full.height / meta.height, full.width / meta.width),
                min_area=self.options.min_area,
                simplify=self.options.simplify,
                nodata=self.nodata,
                mpp=self.source.full_mpp,
                metadata=self.tags,
            )
        )

    def _rasters(self) -> dict[str, dict[str, Any]]:
        meta = self.meta
        place = meta.georeference
        whole = dict(height=meta.height, width=meta.width, georeference=place)
        kinds = super()._rasters()
        kinds['mask'] = dict(
            **whole,
            dtype=self.dtype,
            nodata=self.nodata,
            class_names=self.classes,
            palette=self.palette if self.dtype == np.uint8 else None,
            pyramid=self._has_pyramid,
            cog=self.options.cog,
            mpp=None if place else meta.mpp,
        )
        if 'probs' in self.paths:
            kinds['probs'] = dict(
                **whole, channels=self.num_channels, dtype=self.probs
            )
        return kinds

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

    def finish(self) -> None:
        """See :class:`Outputs`."""
        super().finish()
        paths = self._places
        if 'areas' in paths:
            write_areas(paths['areas'], self.classes, self.counts, self.meta)
        if 'style' in paths:
            write_qml(paths['style'], self.classes, self.palette, self.nodata)

    def summary(self) -> dict[str, Any]:
        """See :class:`Outputs`."""
        pixels = self.meta.height * self.meta.width
        found = summarise(self.classes, self.counts, pixels)
        return {**found, **super().summary()}

    def _manifest(self) -> dict[str, Any]:
        palette = [list(colour) for colour in self.palette]
        return {
            **super()._manifest(),
            'nodata': self.nodata,
            'palette': palette,
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

    def _measure(self, top: int, classes: np.ndarray) -> None:
        if (labels := self.source.labels) is None:
            return
        left, width = self.image.window.col, self.image.width
        window = Window(top, left, len(classes), width)
        areas = count_areas(
            torch.from_numpy(classes.astype(np.int64)),
            torch.from_numpy(labels.read_labels(window).astype(np.int64)),
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

    def _draw(self, path: Path) -> None:
        assert self._overview is not None
        picture, _ = self._thumbnail(*self._overview.shape)
        write_overlay(
            path,
            picture,
            np.minimum(self._overview, self.num_classes),
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
