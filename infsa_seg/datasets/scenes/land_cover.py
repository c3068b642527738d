# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A countryside from above: fields, woods, villages, roads and water."""

import numpy as np
from numpy.typing import ArrayLike

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
# direction of their rows tells them apart.
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
)
_CUTS = np.array([0.37, 0.74, 0.82, 0.88], np.float32)
_VILLAGE = 4
_ROOFS = np.array(
    [(176, 84, 66), (148, 132, 124), (196, 150, 112)], np.float32
)


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
        tuple: Colours, float32 (H, W, 3) in 0 to 255; labels, uint8 (H, W).
    """
    y, x = rows.astype(np.float64), cols.astype(np.float64)
    mottle = noise.child('mottle').fractal(y, x, 20)[..., None]
    rgb, label = _fields(noise, rows, cols, swapped)
    rgb *= 0.8 + 0.4 * mottle

    wood = noise.child('wood').fractal(y, x, 60) > 0.66
    crowns = noise.child('crowns').fractal(y, x, 7, 2)[..., None]
    _cover(rgb, label, wood, FOREST, (0.3 + 0.9 * crowns) * (56, 92, 50))

    relief = noise.child('relief').fractal(y, x, 150)
    depth = np.minimum(np.abs(relief - 0.56) - 0.012, relief - 0.26)
    _cover(rgb, label, depth < 0.008, SOIL, (186, 170, 134))
    shallows = np.clip(1 + depth * 12, 0.55, 1)[..., None]
    _cover(rgb, label, depth < 0, WATER, shallows * (62, 104, 130))

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
    rgb = _COLOURS[use]
    ripeness = (parcels.draw(1) - 0.5) * np.where(use < 2, 40, 16)
    rgb += ripeness[..., None] * np.array((1, -1, 0.5))

    # Two pixels of plants, two of soil; every field starts somewhere else.
    start = (4 * parcels.draw(2)).astype(np.int64)
    lying = np.where((rows + start) % 4 < 2, 22, -22)
    standing = np.where((cols + start) % 4 < 2, 22, -22)
    plants = np.select([use == 0, use == 1], [lying, standing])
    rgb += plants[..., None]

    uses = _USES[[1, 0, 2, 3, 4]] if swapped else _USES
    label = uses[use]

    hedge = ~parcels.inside(1.0)
    _cover(rgb, label, hedge, GRASS, (92, 122, 66))

    plots = noise.child('plots').parcels(y, x, 15)
    built = (use == _VILLAGE) & (plots.draw(0) < 0.85)
    margin = 1.5 + 2 * plots.draw(1)
    rgb[built & plots.inside(margin, shift=2)] *= 0.55
    roof = _ROOFS[(len(_ROOFS) * plots.draw(2)).astype(np.int64)]
    _cover(rgb, label, built & plots.inside(margin), BUILDING, roof)
    return rgb, label


def _distance_to_road(
    noise: Noise, y: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Pixels to the middle of the nearest road, along rows or columns."""
    bend = 40 * (noise.child('bend').smooth(y, x, 90) - np.float32(0.5))
    roads = noise.child('roads').parcels(y + bend, x + bend, 160)
    return np.minimum(roads.top, roads.left)


def _cover(
    rgb: np.ndarray,
    label: np.ndarray,
    mask: np.ndarray,
    value: int,
    colour: ArrayLike,
) -> None:
    """Overwrite colours and labels under a mask, in place."""
    np.copyto(rgb, colour, where=mask[..., None])
    label[mask] = value
