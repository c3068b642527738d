# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Regions in eight grey textures, and a legend that names their classes.

Every scene deals the textures out to the classes anew, two to each, so that
a texture means nothing without the legend. One patch of the legend holds one
whole entry: the texture, printed in the colour of its class.
"""

import numpy as np

from .noise import Noise

CLASSES = ('red', 'green', 'blue', 'yellow')
PALETTE = [[222, 76, 66], [84, 176, 84], [72, 128, 232], [236, 196, 60]]


def _textures() -> np.ndarray:
    """Eight patterns of -1 and 1, float32 (8, 8, 8), periodic, of mean 0."""
    r, c = np.mgrid[:8, :8]
    patterns = [
        r // 2,
        r // 4,
        c // 2,
        c // 4,
        (r + c) // 4,
        (r - c) // 4,
        r // 2 + c // 2,
        r // 4 + c // 4,
    ]
    return np.array(patterns, np.float32) % 2 * 2 - 1


TEXTURES = _textures()


def paint(
    noise: Noise,
    deal: Noise,
    rows: np.ndarray,
    cols: np.ndarray,
    scene_width: int,
    patch: int,
    repeats: int,
    label_legend: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Paint a window of the regions with the legend on top.

    Args:
        noise (Noise): Source of the regions.
        deal (Noise): Source of the legend: what each texture means, and the
            order of the entries.
        rows (np.ndarray): Rows of the window, int64 (H, 1).
        cols (np.ndarray): Columns of the window, int64 (1, W).
        scene_width (int): Width of the scene in pixels.
        patch (int): Side of a legend entry in pixels. Regions are made of
            blocks of this size too, so that a patch shows one texture.
        repeats (int): How often the legend lists each texture.
        label_legend (bool): Label an entry with the class that it names.

    Returns:
        tuple: Colours, float32 (3, H, W) in 0 to 255; labels, uint8 (H, W),
        255 on the legend unless that is labelled too.
    """
    block_y, block_x = rows // patch, cols // patch
    regions = noise.child('regions').parcels(block_y, block_x, 4)
    texture = (len(TEXTURES) * regions.draw(0)).astype(np.int64)
    meaning = _shuffle(deal.child('meaning'), len(TEXTURES)) % len(CLASSES)
    label = meaning[texture].astype(np.uint8)

    entries = _shuffle(deal.child('order'), repeats * len(TEXTURES))
    per_row = shape(scene_width, patch, repeats)[1]
    entry = block_y * per_row + block_x
    listed = (block_x < per_row) & (entry < len(entries))
    texture[listed] = entries[entry[listed]] % len(TEXTURES)

    pattern = TEXTURES[texture, rows % 8, cols % 8]
    rgb = np.full((3, *label.shape), 150, np.float32)
    rgb[:, listed] = np.array(PALETTE).T[:, meaning[texture[listed]]]
    rgb *= 1 + 0.35 * pattern
    label[listed] = meaning[texture[listed]] if label_legend else 255
    return rgb, label


def shape(scene_width: int, patch: int, repeats: int) -> tuple[int, int]:
    """Rows and columns of entries that the legend takes in the corner."""
    entries = repeats * len(TEXTURES)
    per_row = min(entries, scene_width // patch)
    return -(-entries // per_row), per_row


def _shuffle(noise: Noise, length: int) -> np.ndarray:
    """A random order of ``range(length)``, int64."""
    return np.argsort(noise.hash(np.zeros(1), np.arange(length)))
