# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Polygons of a class map that is seen band by band.

All coordinates here are corners of pixels, (x, y) = (col, row), whole numbers
as float64. Rings are closed: the last point is the first. Exteriors run
clockwise for who takes y as pointing up, holes the other way; so the polygon
is always on the same side of its edges, and parts of one can be joined by
following the edges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

# Polygons that are Python objects at the same time.
_BATCH = 8192


@dataclasses.dataclass(frozen=True)
class Polygons:
    """Polygons as flat arrays, in the order of shapely's ragged arrays.

    Attributes:
        classes: class of each, int64 (polygons,).
        points: corners of all rings, float64 (points, 2).
        ring_offsets: where each ring begins in ``points``, and its length at
            the end, int64 (rings + 1,).
        offsets: where each polygon begins among the rings, its exterior
            first, and their number at the end, int64 (polygons + 1,).
    """

    classes: np.ndarray
    points: np.ndarray
    ring_offsets: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.classes)

    @classmethod
    def from_rings(
        cls, classes: list[int], polygons: list[list[np.ndarray]]
    ) -> Polygons:
        """Of lists of rings, the exterior first."""
        rings = [ring for polygon in polygons for ring in polygon]
        return cls(
            np.array(classes, np.int64),
            np.concatenate([np.empty((0, 2)), *rings]),
            _offsets([len(ring) for ring in rings]),
            _offsets([len(polygon) for polygon in polygons]),
        )

    def rings(self, polygon: int) -> list[np.ndarray]:
        """The rings of one of them, each (points, 2)."""
        bounds = self.ring_offsets[
            self.offsets[polygon] : self.offsets[polygon + 1] + 1
        ].tolist()
        return [
            self.points[start:stop]
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]

    def take(self, polygons: np.ndarray, rings: np.ndarray) -> Polygons:
        """Some of them.

        Args:
            polygons: which to keep, bool (polygons,).
            rings: which of their rings to keep, bool (rings,).
        """
        rings = rings & np.repeat(polygons, np.diff(self.offsets))
        sizes = np.diff(self.ring_offsets)
        counts = np.add.reduceat(rings, self.offsets[:-1], dtype=np.int64)
        return Polygons(
            self.classes[polygons],
            self.points[np.repeat(rings, sizes)],
            _offsets(sizes[rings]),
            _offsets(counts[polygons]),
        )

    def ring_areas(self) -> np.ndarray:
        """Square pixels within each ring, float64 (rings,)."""
        return np.abs(_signed_areas(self.points, self.ring_offsets))


class BandPolygons:
    """Finds the polygons of a class map from its bands, from top to bottom.

    A polygon is a set of pixels of one class that hang together by their
    edges. One that touches the lower border of the last band is kept until
    it is known how it goes on; all others are given away at once. The cut
    into bands makes no difference to the polygons, only to their order.

    Args:
        width: Columns of the map.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._row = 0
        self._open: list[_Part] = []
        # Of the last row: class and validity; which open part has a pixel.
        self._classes = np.zeros(width, np.uint8)
        self._valid = np.zeros(width, bool)
        self._owners = np.zeros(width, np.int64)

    @property
    def num_open(self) -> int:
        """Polygons that are kept as they may go on in the next band."""
        return len(self._open)

    def add(
        self, row: int, classes: np.ndarray, valid: np.ndarray
    ) -> Iterator[Polygons]:
        """Take a band; give the polygons that it completes.

        Args:
            row: Number of its first row. If rows are missing before it,
                nothing goes on across the gap.
            classes: uint8 or uint16 (rows, width).
            valid: bool (rows, width); False pixels are of no polygon.
        """
        if row != self._row:
            yield from self.finish()
        parts: list[_Part] = []
        end = row + len(classes)
        for batch in _polygonize(row, classes, valid):
            top, bottom = _extent(batch)
            touches = (top == row) | (bottom == end)
            inner = ~touches
            if inner.any():
                yield batch.take(
                    inner, np.ones(len(batch.ring_offsets) - 1, bool)
                )
            # Copied: a view would keep the batch.
            parts += [
                _Part(
                    int(batch.classes[i]),
                    [ring.copy() for ring in batch.rings(i)],
                    bool(bottom[i] == end),
                )
                for i in np.flatnonzero(touches).tolist()
            ]
        groups = self._join(row, classes[0], valid[0], parts)
        self._open = [part for part in groups if part.goes_on]
        self._classes, self._valid = classes[-1].copy(), valid[-1].copy()
        self._owners = _owners(self._open, end, self._valid)
        self._row = end
        closed = [part for part in groups if not part.goes_on]
        if closed:
            yield _complete(closed)

    def finish(self) -> Iterator[Polygons]:
        """Give the polygons that are still kept: nothing follows."""
        closed, self._open = self._open, []
        self._valid[:] = False
        if closed:
            yield _complete(closed)

    def _join(
        self,
        row: int,
        classes: np.ndarray,
        valid: np.ndarray,
        parts: list[_Part],
    ) -> list[_Part]:
        """Join the open parts with those of the band that begins at row.

        Args:
            row: Number of the first row of the band.
            classes: Of this row (width,).
            valid: Of this row, bool (width,).
            parts: Of the band, those that touch a border of it.

        Returns:
            What they are together.
        """
        if not self._open:
            return parts
        same = (classes == self._classes) & valid & self._valid
        # Runs of columns in which the border is no border.
        starts, stops = (
            np.flatnonzero(np.diff(same, prepend=False, append=False))
            .reshape(-1, 2)
            .T
        )
        nodes = self._open + parts
        below = _owners(parts, row, valid) + len(self._open)
        pairs = np.unique(
            np.stack([self._owners[same], below[same]], 1), axis=0
        )
        for part in self._open:
            part.keep(part.cut(row, starts, stops))
        for part in parts:
            part.lines = part.cut(row, starts, stops)
        roots = list(range(len(nodes)))

        def root_of(node: int) -> int:
            while roots[node] != node:
                roots[node] = roots[roots[node]]
                node = roots[node]
            return node

        # Which of the open parts go on is for the new ones to say.
        for part in self._open:
            part.goes_on = False
        for pair in pairs.tolist():
            upper, lower = map(root_of, pair)
            if upper != lower:
                # Long lists stay; short ones are copied.
                if nodes[upper].size < nodes[lower].size:
                    upper, lower = lower, upper
                roots[lower] = upper
                nodes[upper].absorb(nodes[lower])
        return [part for i, part in enumerate(nodes) if roots[i] == i]


class _Part:
    """A polygon, of which more may lie below.

    Args:
        label: Its class.
        rings: The exterior first: only this can lie on a border of the band.
        goes_on: Whether it touches the lower border of the last band.
    """

    def __init__(
        self, label: int, rings: list[np.ndarray], goes_on: bool
    ) -> None:
        self.label, self.goes_on = label, goes_on
        # Those of the last band that may lie on its borders, closed or not.
        self.lines = rings[:1]
        self.rings = rings[1:]
        # Edges from one border to another, where the polygon goes on.
        self.chains: list[np.ndarray] = []
        self.is_joined = False

    @property
    def size(self) -> int:
        return len(self.rings) + len(self.chains)

    def cut(
        self, row: int, starts: np.ndarray, stops: np.ndarray
    ) -> list[np.ndarray]:
        """Take its lines, without edges in runs of columns of a border."""
        lines, self.lines = self.lines, []
        return [
            piece for line in lines for piece in _cut(line, row, starts, stops)
        ]

    def keep(self, lines: Iterable[np.ndarray]) -> None:
        """Keep lines that lie on no border that is yet to come."""
        for line in lines:
            kept = self.rings if _is_closed(line) else self.chains
            kept.append(line)

    def absorb(self, other: _Part) -> None:
        """Become one with another."""
        self.lines += other.lines
        self.rings += other.rings
        self.chains += other.chains
        self.goes_on |= other.goes_on
        self.is_joined = True

    def complete(self) -> list[np.ndarray]:
        """Its rings, the exterior first, when nothing more can come."""
        self.keep(self.lines)
        if not self.is_joined:
            # One part: its only line is the exterior.
            return [self.rings[-1], *self.rings[:-1]]
        rings = [_corners(ring) for ring in self.rings + _link(self.chains)]
        rings = _split(rings)
        areas = _signed_areas(
            np.concatenate(rings), _offsets([len(ring) for ring in rings])
        )
        exterior = int(np.argmin(areas))
        return [rings.pop(exterior), *rings]


def _polygonize(
    row: int, classes: np.ndarray, valid: np.ndarray
) -> Iterator[Polygons]:
    """The polygons of a band by itself, in batches."""
    from rasterio.features import shapes

    found: Iterator[tuple[dict[str, Any], float]] = shapes(
        classes, mask=None if valid.all() else valid, connectivity=4
    )
    while batch := list(islice(found, _BATCH)):
        polygons = [shape['coordinates'] for shape, _ in batch]
        rings = list(chain.from_iterable(polygons))
        ring_offsets = _offsets([len(ring) for ring in rings])
        flat = chain.from_iterable(chain.from_iterable(rings))
        points = np.fromiter(flat, np.float64, 2 * ring_offsets[-1])
        points = points.reshape(-1, 2)
        points[:, 1] += row
        yield Polygons(
            np.array([label for _, label in batch], np.int64),
            points,
            ring_offsets,
            _offsets([len(polygon) for polygon in polygons]),
        )


def _complete(parts: list[_Part]) -> Polygons:
    return Polygons.from_rings(
        [part.label for part in parts], [part.complete() for part in parts]
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
    """Which of the parts has each pixel along a border.

    Args:
        parts: All that have edges there.
        row: Of the border.
        valid: Of the pixels on the side of the parts, bool (width,).

    Returns:
        int64 (width,), -1 where the pixel is not valid.
    """
    lefts, rights, numbers = [], [], []
    for number, part in enumerate(parts):
        for line in part.lines:
            edges = _edges(line, row)
            ends = line[edges, 0], line[edges + 1, 0]
            lefts.append(np.minimum(*ends))
            rights.append(np.maximum(*ends))
            numbers.append(np.full(len(edges), number))
    owners = np.full(len(valid), -1)
    if lefts:
        left, right = np.concatenate(lefts), np.concatenate(rights)
        # Side by side, they cover the valid pixels.
        order = np.argsort(left)
        lengths = (right - left)[order].astype(np.int64)
        owners[valid] = np.repeat(np.concatenate(numbers)[order], lengths)
    return owners


def _edges(line: np.ndarray, row: int) -> np.ndarray:
    """Where in a line the edges along a border begin."""
    level = line[:, 1] == row
    return np.flatnonzero(level[:-1] & level[1:])


def _cut(
    line: np.ndarray, row: int, starts: np.ndarray, stops: np.ndarray
) -> list[np.ndarray]:
    """What is left of a line, closed or not, without some of its edges.

    Args:
        line: (points, 2).
        row: Of the border.
        starts: First column of each run of the border that is left out.
        stops: Columns after them.
    """
    pieces: list[np.ndarray] = []
    begin, lead = 0, line[:0]
    for edge in _edges(line, row).tolist():
        enter, leave = line[edge, 0], line[edge + 1, 0]
        low, high = min(enter, leave), max(enter, leave)
        first = np.searchsorted(stops, low, 'right')
        last = np.searchsorted(starts, high, 'left')
        runs = np.stack([starts[first:last], stops[first:last]], 1)
        runs = np.clip(runs, low, high)
        if leave < enter:
            runs = runs[::-1, ::-1]
        for x, next_x in runs.tolist():
            pieces.append(
                np.concatenate([lead, line[begin : edge + 1], [[x, row]]])
            )
            begin, lead = edge + 1, np.array([[next_x, row]], float)
    if not pieces:
        return [line]
    pieces.append(np.concatenate([lead, line[begin:]]))
    if _is_closed(line):
        first_piece = pieces.pop(0)
        pieces.append(np.concatenate([pieces.pop(), first_piece[1:]]))
    # A run that ends at a corner gives this corner twice.
    pieces = [
        piece[np.append(True, (piece[1:] != piece[:-1]).any(1))]
        for piece in pieces
    ]
    return [piece for piece in pieces if len(piece) > 1]


def _link(chains: list[np.ndarray]) -> list[np.ndarray]:
    """Join chains, each of which ends where one begins, to rings."""
    following = {piece[0].tobytes(): i for i, piece in enumerate(chains)}
    unused = dict.fromkeys(range(len(chains)))
    rings = []
    while unused:
        i = next(iter(unused))
        pieces = [chains[i][:1]]
        while i in unused:
            del unused[i]
            pieces.append(chains[i][1:])
            i = following[chains[i][-1].tobytes()]
        rings.append(np.concatenate(pieces))
    return rings


def _corners(ring: np.ndarray) -> np.ndarray:
    """A ring without the points at which it goes straight on."""
    points = ring[:-1]
    straight = points == np.roll(points, -1, 0)
    # Two edges in a row along the same axis.
    turns = ~(straight & np.roll(straight, 1, 0)).any(1)
    corners = points[turns]
    return np.concatenate([corners, corners[:1]])


def _split(rings: list[np.ndarray]) -> list[np.ndarray]:
    """Cut rings where a polygon touches itself at a corner.

    Two of its pixels meet there. A ring that follows each of them around the
    corner passes it twice; the holes and the exterior that touch there are
    told apart by crossing from one pixel to the other.

    Args:
        rings: All of one polygon, corners only.
    """
    points = np.concatenate([ring[:-1] for ring in rings])
    lengths = np.array([len(ring) - 1 for ring in rings])
    offsets = _offsets(lengths)
    key = points[:, 0] + 1j * points[:, 1]
    order = np.argsort(key, kind='stable')
    twice = np.flatnonzero(key[order[1:]] == key[order[:-1]])
    one, other = order[twice], order[twice + 1]
    # The edges around the corner: before and after it, as GDAL orients them.
    starts, sizes = (np.repeat(a, lengths) for a in (offsets[:-1], lengths))
    place = np.arange(len(points)) - starts

    def neighbour(of: np.ndarray, step: int) -> np.ndarray:
        return points[starts[of] + (place[of] + step) % sizes[of]]

    before = points[one] - neighbour(one, -1)
    after = neighbour(one, 1) - points[one]
    convex = before[:, 0] * after[:, 1] < before[:, 1] * after[:, 0]
    one, other = one[convex], other[convex]
    if not len(one):
        return rings
    partner = dict(
        zip(
            np.append(one, other).tolist(),
            np.append(other, one).tolist(),
            strict=True,
        )
    )
    # From each passage of such a corner to the next one on its ring.
    passages = np.sort(np.fromiter(partner, np.int64, len(partner)))
    bounds = np.searchsorted(passages, offsets)
    result, tails = [], {}
    for i, ring in enumerate(rings):
        own = passages[bounds[i] : bounds[i + 1]]
        if not len(own):
            result.append(ring)
            continue
        cuts = own - offsets[i]
        around = np.concatenate([ring[:-1], ring[: cuts[0] + 1]])
        stops = np.append(cuts[1:], len(ring) - 1 + cuts[0])
        for passage, following, start, stop in zip(
            own.tolist(), np.roll(own, -1).tolist(), cuts, stops, strict=True
        ):
            tails[passage] = around[start + 1 : stop + 1], following
    while tails:
        passage = next(iter(tails))
        pieces = []
        while passage in tails:
            tail, following = tails.pop(passage)
            pieces.append(tail)
            passage = partner[following]
        corners = np.concatenate(pieces)
        result.append(np.concatenate([corners, corners[:1]]))
    return result


def _is_closed(line: np.ndarray) -> bool:
    return bool((line[0] == line[-1]).all())


def _offsets(sizes: Any) -> np.ndarray:
    """Where each of consecutive pieces begins, and the last one ends."""
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def _signed_areas(points: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The area within each closed ring, negative for exteriors."""
    # Relative to their first points: exact, however far from the origin.
    near = points - np.repeat(points[offsets[:-1]], np.diff(offsets), axis=0)
    x, y = near.T
    # A ring's last point has no successor: that product is left out as the
    # next ring begins at (0, 0) of its own.
    cross = np.append(x[:-1] * y[1:] - x[1:] * y[:-1], 0.0)
    return np.asarray(np.add.reduceat(cross, offsets[:-1])) / 2
