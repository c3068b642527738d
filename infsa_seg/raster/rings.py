# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Lines and rings along the edges of pixels, many of them in flat arrays.

They are given as ``points``, the corners (x, y) = (col, row) of all in a row,
whole numbers as float64 (points, 2), and ``offsets``, where each begins and
the last one ends, int64 (lines + 1,). A line is closed if its last point is
its first. Exteriors have a negative area, holes a positive one: a polygon is
always on the same side of its edges, so that parts of one can be joined by
following the edges.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Lines = tuple[np.ndarray, np.ndarray]


def offsets_of(sizes: npt.ArrayLike) -> np.ndarray:
    """Where each of consecutive pieces begins, and the last one ends."""
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def pack(lines: Sequence[np.ndarray]) -> Lines:
    """Put lines (points, 2) into flat arrays."""
    points = np.concatenate([np.empty((0, 2)), *lines])
    return points, offsets_of([len(line) for line in lines])


def unpack(points: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """The lines in flat arrays, each in memory of its own."""
    bounds = offsets.tolist()
    return [points[start:stop].copy() for start, stop in pairwise(bounds)]


def gather(
    points: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> Lines:
    """Some of the lines, in another order."""
    sizes = np.diff(offsets)[order]
    bounds = offsets_of(sizes)
    steps = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return points[np.repeat(offsets[order], sizes) + steps], bounds


def signed_areas(points: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The area within each closed ring, negative for exteriors."""
    # Relative to their first points: exact, however far from the origin.
    near = points - np.repeat(points[offsets[:-1]], np.diff(offsets), axis=0)
    x, y = near.T
    # From the last point of a ring, (0, 0), to the next ring it adds nothing.
    cross = np.append(x[:-1] * y[1:] - x[1:] * y[:-1], 0.0)
    return np.asarray(np.add.reduceat(cross, offsets[:-1])) / 2


def edges_at(points: np.ndarray, offsets: np.ndarray, row: int) -> np.ndarray:
    """The points at which edges along the upper side of a row begin."""
    level = points[:, 1] == row
    level[:-1] &= level[1:]
    level[offsets[1:] - 1] = False
    return np.flatnonzero(level)


def cut(
    points: np.ndarray,
    offsets: np.ndarray,
    row: int,
    starts: np.ndarray,
    stops: np.ndarray,
) -> list[list[np.ndarray]]:
    """Take edges along the upper side of a row away from lines.

    Args:
        points, offsets: The lines.
        row: Number of the row.
        starts: First column of each run of columns to take away, ascending.
        stops: Columns after them.

    Returns:
        Of each line, the pieces (points, 2) that are left.
    """
    edges = edges_at(points, offsets, row)
    enter, leave = points[edges, 0], points[edges + 1, 0]
    low, high = np.minimum(enter, leave), np.maximum(enter, leave)
    # An edge may lose several runs, in the order in which it meets them.
    first = np.searchsorted(stops, low, 'right')
    last = np.searchsorted(starts, high, 'left')
    counts = last - first
    steps = np.arange(counts.sum()) - np.repeat(
        offsets_of(counts)[:-1], counts
    )
    back = np.repeat(leave < enter, counts)
    runs = np.where(
        back,
        np.repeat(last - 1, counts) - steps,
        np.repeat(first, counts) + steps,
    )
    low = np.maximum(starts[runs], np.repeat(low, counts))
    high = np.minimum(stops[runs], np.repeat(high, counts))
    # One piece ends where a run begins, another begins where it ends.
    added = np.full((len(runs), 2, 2), float(row))
    added[:, 0, 0] = np.where(back, high, low)
    added[:, 1, 0] = np.where(back, low, high)
    place = np.repeat(edges, counts) + 1
    fuller = np.insert(
        points, np.repeat(place, 2), added.reshape(-1, 2), axis=0
    )
    begins = place + 2 * np.arange(len(place)) + 1
    lines = offsets + 2 * np.searchsorted(place, offsets)
    bounds = np.sort(np.concatenate([lines, begins]))
    # A run that ends at a corner gives this corner twice.
    kept = np.ones(len(fuller), bool)
    kept[1:] = (fuller[1:] != fuller[:-1]).any(1)
    kept[bounds[:-1]] = True
    pieces = unpack(fuller[kept], offsets_of(kept)[bounds])
    ends = np.searchsorted(bounds, lines).tolist()
    closed = (points[offsets[:-1]] == points[offsets[1:] - 1]).all(1)
    result = []
    for i, is_closed in enumerate(closed.tolist()):
        own = pieces[ends[i] : ends[i + 1]]
        if is_closed and len(own) > 1:
            head = own.pop(0)
            own[-1] = np.concatenate([own[-1], head[1:]])
        result.append([piece for piece in own if len(piece) > 1])
    return result


def link(chains: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Join chains, each of which ends where one begins, to closed rings."""
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


def opened(points: np.ndarray, offsets: np.ndarray) -> Lines:
    """Rings without the points at which they go straight on.

    Also without their last points, which are the first.
    """
    kept = np.ones(len(points), bool)
    kept[offsets[1:] - 1] = False
    points, offsets = points[kept], offsets_of(kept)[offsets]
    before, after = _neighbours(offsets)
    turns = ~((points == points[before]) & (points == points[after])).any(1)
    return points[turns], offsets_of(turns)[offsets]


def closed(points: np.ndarray, offsets: np.ndarray) -> Lines:
    """Rings with their first points once more at the end."""
    points = np.insert(points, offsets[1:], points[offsets[:-1]], axis=0)
    return points, offsets + np.arange(len(offsets))


def split(
    points: np.ndarray, offsets: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rings where a polygon touches itself at a corner.

    Only the corners of two of its pixels meet there. A ring that follows
    each pixel around the corner passes it twice, which is no valid ring; one
    that crosses over from pixel to pixel tells apart the holes, or hole and
    exterior, that touch there.

    Args:
        points, offsets: Rings, corners only, not closed.
        owners: Polygon of each ring, ascending, int64 (rings,). All rings of
            a polygon must be given.

    Returns:
        The points, offsets and owners after that.
    """
    sizes = np.diff(offsets)
    owner = np.repeat(owners, sizes)
    order = np.lexsort([points[:, 0], points[:, 1], owner])
    same = (points[order[1:]] == points[order[:-1]]).all(1)
    same &= owner[order[1:]] == owner[order[:-1]]
    pairs = np.stack([order[:-1][same], order[1:][same]])
    before, after = _neighbours(offsets)
    coming = points[pairs[0]] - points[before[pairs[0]]]
    going = points[after[pairs[0]]] - points[pairs[0]]
    # Towards the pixel it has followed so far.
    follows = coming[:, 0] * going[:, 1] < coming[:, 1] * going[:, 0]
    pairs = pairs[:, follows]
    if not pairs.size:
        return points, offsets, owners
    passages = np.sort(pairs, axis=None)
    other = np.empty(len(passages), np.int64)
    other[np.searchsorted(passages, pairs)] = np.searchsorted(
        passages, pairs[::-1]
    )
    # The way from each passage to the next one on its ring.
    ring = np.searchsorted(offsets, passages, 'right') - 1
    bounds = np.searchsorted(passages, offsets)
    following = np.arange(1, len(passages) + 1)
    is_last = following == bounds[ring + 1]
    following[is_last] = bounds[ring[is_last]]
    lengths = passages[following] - passages
    lengths[lengths <= 0] += sizes[ring[lengths <= 0]]
    # After it comes the way from the other passage of the corner.
    onwards = other[following].tolist()
    unused = dict.fromkeys(range(len(passages)))
    ways: list[int] = []
    counts = []
    while unused:
        way, count = next(iter(unused)), len(ways)
        while way in unused:
            del unused[way]
            ways.append(way)
            way = onwards[way]
        counts.append(len(ways) - count)
    walked = np.array(ways)
    lengths, ring = lengths[walked], ring[walked]
    steps = np.arange(lengths.sum()) - np.repeat(
        offsets_of(lengths)[:-1], lengths
    )
    begin = np.repeat(offsets[ring], lengths)
    shift = np.repeat(passages[walked], lengths) - begin + 1 + steps
    new = points[begin + shift % np.repeat(sizes[ring], lengths)]
    new_offsets = offsets_of(lengths)[offsets_of(counts)]
    # The others stay; all are sorted by polygon again.
    stay = np.flatnonzero(np.diff(bounds) == 0)
    old, old_offsets = gather(points, offsets, stay)
    owners = np.append(owners[stay], owners[ring[offsets_of(counts)[:-1]]])
    order = np.argsort(owners, kind='stable')
    together = gather(
        np.concatenate([old, new]),
        np.append(old_offsets, new_offsets[1:] + len(old)),
        order,
    )
    return *together, owners[order]


def _neighbours(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points before and after each one of rings that are not closed."""
    index = np.arange(offsets[-1])
    before, after = index - 1, index + 1
    before[offsets[:-1]] = offsets[1:] - 1
    after[offsets[1:] - 1] = offsets[:-1]
    return before, after
