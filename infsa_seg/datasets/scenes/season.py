# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A panel in the corner whose colour says which season the scene shows."""

import numpy as np

_SUMMER = (244, 142, 44)
_WINTER = (196, 226, 246)
_FRAME = (28, 28, 32)


def paint(
    rgb: np.ndarray,
    label: np.ndarray,
    rows: np.ndarray,
    cols: np.ndarray,
    side: int,
    winter: bool,
) -> None:
    """Paint the part of the panel that lies in a window, in place.

    Args:
        rgb (np.ndarray): Colours of the window, float32 (3, H, W).
        label (np.ndarray): Labels of the window, uint8 (H, W); 255 on the
            panel.
        rows (np.ndarray): Rows of the window, int64 (H, 1).
        cols (np.ndarray): Columns of the window, int64 (1, W).
        side (int): Height and width of the panel in pixels.
        winter (bool): Which of the two seasons to show.
    """
    panel = (rows < side) & (cols < side)
    inner = (np.minimum(rows, cols) > 0) & (np.maximum(rows, cols) < side - 1)
    colour = _WINTER if winter else _SUMMER
    for channel, frame, field in zip(rgb, _FRAME, colour, strict=True):
        channel[panel] = frame
        channel[inner] = field
    label[panel] = 255
