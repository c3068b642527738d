# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A countryside from above: fields, woods, villages, roads and water."""

import numpy as np

from .noise import Noise

CLASSES = (
    'water',
    'grass',
    'forest',
    'soil',
    'road',
    'building',
    'winter crop',
    'summer crop',
)
PALETTE = [
    [38, 84, 140],
    [150, 196, 94],
    [34, 98, 52],
    [150, 112, 76],
    [92, 92, 96],
    [198, 60, 48],
    [240, 200, 70],
    [214, 120, 196],
]
WATER, GRASS, FOREST, SOIL, ROAD, BUILDING, WINTER, SUMMER = range(8)

# The uses of a parcel, their colours, and the share of the land up to each.
# Villages are grass with houses on it. The two crops share a colour; only the
# direction of their rows tells them apart. One direction is more common, or a
# network would have to find the season and its use at once, which takes long.
_USES = np.array([WINTER, SUMMER, GRASS, SOIL, GRASS], np.uint8)
_COLOURS = np.array(
    [
        (176, 172, 88),
        (176, 172, 88),
        (122, 158, 80),
        (152, 120, 90),
        (136, 152, 96),
    ],
    np.float32,
).T
_CUTS = np.array([0.52, 0.74, 0.82, 0.88], np.float32)
_VILLAGE = 4
_ROOFS = np.array(
    [(176, 84, 66), (148, 132, 124), (196, 150, 112)], np.float32
).T


def paint(
    noise: Noise, rows: np.ndarray, cols: np.ndarray, swapped: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Paint a window of the countryside.

    Args:
        noise (Noise): Source of everything random.
        rows (np.ndarray): Rows of the window, int64 (H, 1).
        cols (np.ndarray): Columns of the window, int64 (1, W).
        swapped (bool): Exchanges the labels of the two crops, and nothing
            else.

    Returns:
        tuple: Colours, float32 (3, H, W) in 0 to 255; labels, uint8 (H, W).
    """
    y, x = rows.astype(np.float64), cols.astype(np.float64)
    mottle = noise.child('mottle').fractal(y, x, 20)
    rgb, label = _fields(noise, rows, cols, swapped)
    rgb *= 0.8 + 0.4 * mottle

    wood = noise.child('wood').fractal(y, x, 60) > 0.66
    crowns = noise.child('crowns').fractal(y, x, 7, 2)
    leaves = _colour(56, 92, 50) * (0.3 + 0.9 * crowns)
    _cover(rgb, label, wood, FOREST, leaves)

    relief = noise.child('relief').fractal(y, x, 150)
    depth = np.minimum(np.abs(relief - 0.56) - 0.012, relief - 0.26)
    _cover(rgb, label, depth < 0.008, SOIL, _colour(186, 170, 134))
    shallows = np.clip(1 + 12 * depth, 0.55, 1)
    _cover(rgb, label, depth < 0, WATER, _colour(62, 104, 130) * shallows)

    road = _distance_to_road(noise, y, x)
    _cover(rgb, label, road < 2.5, ROAD, 110 + 50 * mottle)
    return rgb, label


def _fields(
    noise: Noise, rows: np.ndarray, cols: np.ndarray, swapped: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Paint the parcels: crops in rows, grass, soil, and houses."""
    y, x = rows.astype(np.float64), cols.astype(np.float64)
    parcels = noise.child('parcels').parcels(y, x, 44)
    use = np.searchsorted(_CUTS, parcels.draw(0), 'right')
    uses = _USES[[1, 0, 2, 3, 4]] if swapped else _USES
    label = uses[use]
    crop = use < 2
    ripeness = (parcels.draw(1) - 0.5) * np.where(crop, 1, np.float32(0.4))
    rgb = _COLOURS.take(use, 1) + _colour(40, -40, 20) * ripeness

    # Two pixels of plants, two of soil; every field starts somewhere else.
    start = (4 * parcels.draw(2)).astype(np.int64)
    plants = (np.where(use == 0, rows, cols) + start) % 4 < 2
    rgb += np.where(plants, np.float32(34), np.float32(-34)) * crop

    hedge = ~parcels.inside(1.0)
    _cover(rgb, label, hedge, GRASS, _colour(92, 122, 66))

    plots = noise.child('plots').parcels(y, x, 15)
    built = (use == _VILLAGE) & (plots.draw(0) < 0.85)
    margin = 1.5 + 2 * plots.draw(1)
    rgb[:, built & plots.inside(margin, shift=2)] *= 0.55
    roof = (_ROOFS.shape[1] * plots.draw(2)).astype(np.int64)
    house = built & plots.inside(margin)
    _cover(rgb, label, house, BUILDING, _ROOFS.take(roof, 1))
    return rgb, label


def _distance_to_road(
    noise: Noise, y: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Pixels to the middle of the nearest road, along rows or columns."""
    bend = 40 * (noise.child('bend').smooth(y, x, 90) - np.float32(0.5))
    roads = noise.child('roads').parcels(y + bend, x + bend, 160)
    return np.minimum(roads.top, roads.left)


def _colour(red: float, green: float, blue: float) -> np.ndarray:
    """Shape a colour to go with arrays of (3, H, W)."""
    return np.array([[[red]], [[green]], [[blue]]], np.float32)


def _cover(
    rgb: np.ndarray,
    label: np.ndarray,
    mask: np.ndarray,
    value: int,
    colour: np.ndarray,
) -> None:
    """Overwrite colours and labels under a mask, in place."""
    np.copyto(rgb, colour, where=mask)
    label[mask] = value
