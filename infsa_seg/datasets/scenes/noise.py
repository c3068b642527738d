# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Random fields over an unbounded pixel plane, from integer hashing.

Every value is a function of the key and of absolute pixel coordinates, so
any window of a field equals the crop of the whole, bit for bit. To keep it
so, floats only meet ``+ - * /`` and ``floor``: these round alike in vector
and scalar code, which sines and exponentials need not do.
"""

from typing import NamedTuple

import numpy as np

_STEP = 0x9E3779B97F4A7C15


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def to_unit(hashes: np.ndarray) -> np.ndarray:
    """Turn uint64 hashes into float32 numbers in [0, 1)."""
    return (hashes >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


class Parcels(NamedTuple):
    """What each pixel knows of its parcel, arrays of the pixels' shape.

    ``key`` (uint64) is drawn per parcel; the others (float32) are distances
    in pixels to the four sides.
    """

    key: np.ndarray
    top: np.ndarray
    bottom: np.ndarray
    left: np.ndarray
    right: np.ndarray

    def draw(self, number: int) -> np.ndarray:
        """Give one of four independent draws per parcel, float32 in [0, 1)."""
        bits = self.key >> np.uint64(16 * number) & np.uint64(0xFFFF)
        return bits.astype(np.float32) * np.float32(2**-16)

    def inside(
        self, margin: np.ndarray | float, shift: float = 0
    ) -> np.ndarray:
        """Whether pixels are at least ``margin`` from every side.

        Args:
            margin (float or np.ndarray): Distance in pixels.
            shift (float): Moves the answer down and right by this much.
        """
        return (
            (self.top - shift >= margin)
            & (self.bottom + shift > margin)
            & (self.left - shift >= margin)
            & (self.right + shift > margin)
        )


class Noise:
    """A family of random fields.

    Coordinates are in pixels. ``y`` (H, 1) with ``x`` (1, W) describes a
    window cheaply; full (H, W) arrays are allowed, to bend the plane first.

    Args:
        key (int): Names the family; equal keys give equal fields.
    """

    def __init__(self, key: int) -> None:
        self.key = key

    def child(self, *path: int | str) -> 'Noise':
        """Another family, as good as independent of this one."""
        key = self.key
        for part in path:
            if isinstance(part, str):
                part = int.from_bytes(part.encode(), 'little')
            key = int(_mix(_uint64(key + _STEP * (part + 1)))[0])
        return Noise(key)

    def hash(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Hash integer coordinates, broadcast against each other.

        Returns:
            np.ndarray: uint64.
        """
        step = _uint64(_STEP)
        i = _mix(i.astype(np.uint64) * step + _uint64(self.key))
        return _mix(i + j.astype(np.uint64) * step)

    def uniform(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Draw float32 numbers in [0, 1) per integer coordinate."""
        return to_unit(self.hash(i, j))

    def smooth(self, y: np.ndarray, x: np.ndarray, cell: float) -> np.ndarray:
        """Value noise: random nodes ``cell`` pixels apart, eased between.

        Returns:
            np.ndarray: float32 in [0, 1).
        """
        i, ty = _split(y, cell)
        j, tx = _split(x, cell)
        i0, j0 = i.min(), j.min()
        nodes = self.uniform(
            np.arange(i0, i.max() + 2)[:, None], np.arange(j0, j.max() + 2)
        )
        i, j = i - i0, j - j0
        # Along y first: where y is a column, that leaves only a few columns
        # to blend, and taking those is all the work that is done per pixel.
        if y.shape[1] == 1 and x.shape[0] == 1:
            columns = _blend(nodes[i[:, 0]], nodes[i[:, 0] + 1], ty)
            return _blend(columns[:, j[0]], columns[:, j[0] + 1], tx)
        left = _blend(_take(nodes, i, j), _take(nodes, i + 1, j), ty)
        right = _blend(_take(nodes, i, j + 1), _take(nodes, i + 1, j + 1), ty)
        return _blend(left, right, tx)

    def fractal(
        self, y: np.ndarray, x: np.ndarray, cell: float, octaves: int = 3
    ) -> np.ndarray:
        """Value noise with ever finer and weaker octaves.

        Returns:
            np.ndarray: float32 in [0, 1).
        """
        total = np.float32(0)
        for octave in range(octaves):
            layer = self.child(octave).smooth(y, x, cell / 2**octave)
            total = total + layer * np.float32(2.0**-octave)
        return total * np.float32(1 / (2 - 2.0 ** (1 - octaves)))

    def parcels(self, y: np.ndarray, x: np.ndarray, cell: float) -> Parcels:
        """Divide the plane into rows of rectangles of about ``cell`` pixels.

        The lines between them are jittered, so that sides vary between half
        and one and a half ``cell``.
        """
        one_lane = np.zeros((1, 1), np.int64)
        i, top, bottom = self.child('rows')._slot(y, cell, one_lane)
        j, left, right = self.child('columns')._slot(x, cell, i)
        i0, j0 = i.min(), j.min()
        keys = self.hash(
            np.arange(i0, i.max() + 1)[:, None], np.arange(j0, j.max() + 1)
        )
        key = _take(keys, i - i0, j - j0)
        return Parcels(key, top, bottom, left, right)

    def _slot(
        self, t: np.ndarray, cell: float, lane: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the slot of ``t`` between jittered lines, drawn per lane.

        Returns:
            tuple: The slot's number (int64), and the distances in pixels
            from the line before and to the line after (float32).
        """
        i = np.floor(t / cell).astype(np.int64)
        i0, lane0 = i.min() - 1, lane.min()
        numbers = np.arange(i0, i.max() + 3)
        lanes = np.arange(lane0, lane.max() + 1)[:, None]
        lines = (numbers + 0.5 * self.uniform(lanes, numbers)) * cell
        lane, i = lane - lane0, i - i0
        i = i - (t < _take(lines, lane, i))
        before = t - _take(lines, lane, i)
        after = _take(lines, lane, i + 1) - t
        return i + i0, before.astype(np.float32), after.astype(np.float32)


def _uint64(number: int) -> np.ndarray:
    """Wrap an integer to one element; overflow of scalars would warn."""
    return np.array([number % 2**64], np.uint64)


def _split(t: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Node number (int64) before ``t``, and the eased way to the next one."""
    t = t / cell
    i = np.floor(t)
    f = (t - i).astype(np.float32)
    return i.astype(np.int64), f * f * (3 - 2 * f)


def _blend(a: np.ndarray, b: np.ndarray, t: np.ndarray) -> np.ndarray:
    return a + (b - a) * t


def _take(table: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """``table[i, j]``, which numpy does five times faster in one dim."""
    return table.ravel().take(i * table.shape[1] + j)
