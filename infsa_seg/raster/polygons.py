# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Polygons of a class map that is seen band by band."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from . import rings as _rings

# Polygons that are Python objects at the same time.
_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class Polygons:
    """Polygons as flat arrays, as ``shapely.from_ragged_array`` takes them.

    Attributes:
        classes: class of each, int64 (polygons,).
        points: corners (x, y) = (col, row) of all rings, whole numbers as
            float64 (points, 2). Rings are closed.
        ring_offsets: where each ring begins in ``points`` and the last one
            ends, int64 (rings + 1,).
        offsets: where each polygon begins among the rings, its exterior
            first, and the last one ends, int64 (polygons + 1,).
    """

    classes: np.ndarray
    points: np.ndarray
    ring_offsets: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.classes)

    def take(
        self, polygons: np.ndarray, rings: np.ndarray | None = None
    ) -> Polygons:
        """Some of them.

        Args:
            polygons: Which to keep, bool (polygons,).
            rings: Which of their rings to keep, bool (rings,); all if None.
        """
        sizes = np.diff(self.offsets)
        kept = np.repeat(polygons, sizes)
        if rings is not None:
            kept &= rings
        sizes = np.add.reduceat(kept, self.offsets[:-1], dtype=np.int64)
        points, ring_offsets = _rings.gather(
            self.points, self.ring_offsets, np.flatnonzero(kept)
        )
        return Polygons(
            self.classes[polygons],
            points,
            ring_offsets,
            _rings.offsets_of(sizes[polygons]),
        )

    def ring_areas(self) -> np.ndarray:
        """Square pixels within each ring, float64 (rings,)."""
        return np.abs(_rings.signed_areas(self.points, self.ring_offsets))


class BandPolygons:
    """Finds the polygons of a class map from its bands, from top to bottom.

    A polygon is a set of pixels of one class that hang together by their
    edges. One that touches the lower border of the last band is kept until
    it is known how it goes on; all others are given away at once. How the
    map is cut into bands makes no difference to the polygons, only to the
    order of them.

    Args:
        width: Columns of the map.
    """

    def __init__(self, width: int) -> None:
        self._row = 0
        self._open: list[_Part] = []
        # Of the last row: class and validity, and which open part it is of.
        self._classes = np.zeros(width, np.uint8)
        self._valid = np.zeros(width, bool)
        self._owners = np.zeros(width, np.int64)

    @property
    def num_open(self) -> int:
        """Polygons that are kept, as they may go on in the next band."""
        return len(self._open)

    def add(
        self, row: int, classes: np.ndarray, valid: np.ndarray
    ) -> Iterator[Polygons]:
        """Take a band; give the polygons that are complete by it.

        Args:
            row: Number of its first row. If rows are missing before it,
                nothing goes on across the gap.
            classes: uint8 or uint16 (rows, width).
            valid: bool (rows, width); pixels that are not are of no polygon.
        """
        if row != self._row:
            yield from self.finish()
        end = row + len(classes)
        parts: list[_Part] = []
        for batch in _polygonize(row, classes, valid):
            top, bottom = _extent(batch)
            touches = (top == row) | (bottom == end)
            if not touches.all():
                yield batch.take(~touches)
            if touches.any():
                parts += _parts(batch.take(touches), bottom[touches] == end)
        parts = self._join(row, classes[0], valid[0], parts)
        self._open = [part for part in parts if part.goes_on]
        self._classes, self._valid = classes[-1].copy(), valid[-1].copy()
        self._owners = _owners(self._open, end, self._valid)
        self._row = end
        complete = [part for part in parts if not part.goes_on]
        if complete:
            yield _complete(complete)

    def finish(self) -> Iterator[Polygons]:
        """Give the polygons that are still kept: nothing follows."""
        complete, self._open = self._open, []
        if complete:
            yield _complete(complete)

    def _join(
        self,
        row: int,
        classes: np.ndarray,
        valid: np.ndarray,
        parts: list[_Part],
    ) -> list[_Part]:
        """Join what is open with the parts in the band that begins at row.

        Args:
            row: Number of the first row of the band.
            classes: Of this row (width,).
            valid: Of this row, bool (width,).
            parts: Of the band, those that touch a border of it.

        Returns:
            The polygons that they are together.
        """
        if not self._open:
            return parts
        same = (classes == self._classes) & valid & self._valid
        lower = _owners(parts, row, valid) + len(self._open)
        pairs = np.unique(
            np.stack([self._owners[same], lower[same]], 1), axis=0
        )
        nodes = self._open + parts
        # Where both sides are of one polygon, the border is no edge of it.
        changes = np.diff(same, prepend=False, append=False)
        starts, stops = np.flatnonzero(changes).reshape(-1, 2).T
        pieces = iter(_rings.cut(*_lines(nodes), row, starts, stops))
        for part in nodes:
            part.lines = [piece for _ in part.lines for piece in next(pieces)]
        for part in self._open:
            part.keep_lines()
            # Whether it does is for its parts in this band to say.
            part.goes_on = False
        roots = list(range(len(nodes)))

        def root_of(node: int) -> int:
            while roots[node] != node:
                roots[node] = roots[roots[node]]
                node = roots[node]
            return node

        for pair in pairs.tolist():
            one, other = map(root_of, pair)
            if one != other:
                # Long lists stay, short ones are copied.
                if nodes[one].size < nodes[other].size:
                    one, other = other, one
                roots[other] = one
                nodes[one].absorb(nodes[other])
        return [part for i, part in enumerate(nodes) if roots[i] == i]


class _Part:
    """A polygon of which more may lie below.

    Args:
        label: Its class.
        lines: Those that may lie on the borders of the last band: its
            exterior, or what is left of it. Closed or not.
        rings: All other rings so far.
        goes_on: Whether it touches the lower border of the last band.
    """

    def __init__(
        self,
        label: int,
        lines: list[np.ndarray],
        rings: list[np.ndarray],
        goes_on: bool,
    ) -> None:
        self.label, self.lines, self.rings = label, lines, rings
        self.goes_on = goes_on
        # Lines from one border to another, where the polygon goes on.
        self.chains: list[np.ndarray] = []

    @property
    def size(self) -> int:
        return len(self.rings) + len(self.chains)

    def keep_lines(self) -> None:
        """Keep its lines as such that are on no border yet to come."""
        for line in self.lines:
            is_closed = bool((line[0] == line[-1]).all())
            (self.rings if is_closed else self.chains).append(line)
        self.lines = []

    def absorb(self, other: _Part) -> None:
        """Become one with another."""
        self.lines += other.lines
        self.rings += other.rings
        self.chains += other.chains
        self.goes_on |= other.goes_on


def _polygonize(
    row: int, classes: np.ndarray, valid: np.ndarray
) -> Iterator[Polygons]:
    """The polygons of a band by itself, in batches."""
    from rasterio.features import shapes

    # With 8 neighbours there would be polygons that cross each other.
    found: Iterator[tuple[dict[str, Any], float]] = shapes(
        classes, mask=None if valid.all() else valid, connectivity=4
    )
    while batch := list(islice(found, _BATCH)):
        polygons = [shape['coordinates'] for shape, _ in batch]
        rings = list(chain.from_iterable(polygons))
        ring_offsets = _rings.offsets_of([len(ring) for ring in rings])
        flat = chain.from_iterable(chain.from_iterable(rings))
        points = np.fromiter(flat, np.float64, 2 * ring_offsets[-1])
        points = points.reshape(-1, 2)
        points[:, 1] += row
        yield Polygons(
            np.array([label for _, label in batch], np.int64),
            points,
            ring_offsets,
            _rings.offsets_of([len(polygon) for polygon in polygons]),
        )


def _parts(polygons: Polygons, goes_on: np.ndarray) -> list[_Part]:
    rings = _rings.unpack(polygons.points, polygons.ring_offsets)
    bounds = polygons.offsets.tolist()
    return [
        _Part(label, [rings[start]], rings[start + 1 : stop], is_open)
        for label, start, stop, is_open in zip(
            polygons.classes.tolist(),
            bounds,
            bounds[1:],
            goes_on.tolist(),
            strict=False,
        )
    ]


def _lines(parts: list[_Part]) -> _rings.Lines:
    return _rings.pack([line for part in parts for line in part.lines])


def _complete(parts: list[_Part]) -> Polygons:
    """The polygons to which nothing more can come."""
    rings, counts = [], []
    for part in parts:
        part.keep_lines()
        own = part.rings + _rings.link(part.chains)
        rings += own
        counts.append(len(own))
    owners = np.repeat(np.arange(len(parts)), counts)
    points, offsets = _rings.opened(*_rings.pack(rings))
    points, offsets, owners = _rings.split(points, offsets, owners)
    points, offsets = _rings.closed(points, offsets)
    # By polygon; of each, the exterior first.
    order = np.lexsort([_rings.signed_areas(points, offsets), owners])
    return Polygons(
        np.array([part.label for part in parts], np.int64),
        *_rings.gather(points, offsets, order),
        _rings.offsets_of(np.bincount(owners)),
    )


def _extent(polygons: Polygons) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest y of each."""
    y, starts = polygons.points[:, 1], polygons.ring_offsets[:-1]
    exteriors = polygons.offsets[:-1]
    return (
        np.minimum.reduceat(y, starts)[exteriors],
        np.maximum.reduceat(y, starts)[exteriors],
    )


def _owners(parts: list[_Part], row: int, valid: np.ndarray) -> np.ndarray:
    """Which of the parts each pixel along a border belongs to.

    Args:
        parts: All that have edges there.
        row: Of the border.
        valid: Of the pixels on the side of the parts, bool (width,).

    Returns:
        int64 (width,); any number where a pixel is not valid.
    """
    points, offsets = _lines(parts)
    edges = _rings.edges_at(points, offsets, row)
    ends = points[edges, 0], points[edges + 1, 0]
    left = np.minimum(*ends)
    lengths = (np.maximum(*ends) - left).astype(np.int64)
    line = np.searchsorted(offsets, edges, 'right') - 1
    owner = np.repeat(
        np.arange(len(parts)), [len(part.lines) for part in parts]
    )[line]
    # Side by side, they cover the valid pixels.
    order = np.argsort(left)
    owners = np.zeros(len(valid), np.int64)
    owners[valid] = np.repeat(owner[order], lengths[order])
    return owners
