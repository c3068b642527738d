# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Reading pictures, and writing class maps that people can look at."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import mmcv
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from infsa_seg.engine import atomic_path

Palette = Sequence[Sequence[int]]
OPACITY = 0.5


def read_image(path: str | Path) -> np.ndarray:
    """Read a picture.

    Args:
        path (str | Path): Anything that OpenCV decodes.

    Returns:
        np.ndarray: BGR, uint8 (rows, columns, 3).

    Raises:
        OSError: The file is not there or cannot be opened.
        ValueError: It is no picture, or a damaged one.
    """
    try:
        image = mmcv.imread(path)
    except cv2.error:
        image = None
    if image is None:
        raise ValueError(f'{path}: not a picture that OpenCV can read')
    return image


def write_mask(path: str | Path, mask: np.ndarray, palette: Palette) -> None:
    """Write a PNG whose values are class indices, shown in their colours.

    Args:
        path (str | Path): Replaced only when the new file is complete.
        mask (np.ndarray): Class indices (rows, columns).
        palette (sequence): One (red, green, blue) per class, at most 256.

    Raises:
        ValueError: There are more classes than a PNG has colours.
    """
    if len(palette) > 256:
        raise ValueError(f'{path}: a PNG has 256 colours, not {len(palette)}')
    picture = Image.fromarray(mask.astype(np.uint8))
    picture.putpalette(np.asarray(palette, np.uint8).tobytes())
    with atomic_path(path) as part:
        picture.save(part, format='PNG')


def write_overlay(
    path: str | Path,
    image: np.ndarray,
    mask: np.ndarray,
    classes: Sequence[str],
    palette: Palette,
) -> None:
    """Write a PNG of the image under its class map, with a legend.

    Args:
        path (str | Path): Replaced only when the new file is complete.
        image (np.ndarray): BGR, uint8 (rows, columns, 3).
        mask (np.ndarray): Class indices (rows, columns).
        classes (sequence): Name of each class.
        palette (sequence): One (red, green, blue) per class.
    """
    colours = np.asarray(palette, np.uint8)[mask]
    blend = cv2.addWeighted(
        image[..., ::-1], 1 - OPACITY, colours, OPACITY, gamma=0
    )
    shares = np.bincount(mask.ravel(), minlength=len(classes)) / mask.size
    entries = [
        (f'{classes[index]}  {shares[index]:.1%}', tuple(palette[index]))
        for index in np.argsort(-shares, kind='stable')
        if shares[index]
    ]
    with atomic_path(path) as part:
        _beside(Image.fromarray(blend), entries).save(part, format='PNG')


def _beside(
    picture: Image.Image, entries: Sequence[tuple[str, tuple[int, ...]]]
) -> Image.Image:
    """Add a column with a coloured square and a text for each entry."""
    size = max(12, picture.height // 40)
    font = ImageFont.load_default(size)
    line = size * 3 // 2
    width = max(int(font.getlength(text)) for text, _ in entries)
    sheet = Image.new(
        'RGB',
        (
            picture.width + 3 * line + width,
            max(picture.height, line * (len(entries) + 1)),
        ),
        'white',
    )
    sheet.paste(picture)
    draw = ImageDraw.Draw(sheet)
    left = picture.width + line // 2
    for row, (text, colour) in enumerate(entries):
        top = line // 2 + row * line
        draw.rectangle((left, top, left + size, top + size), colour, 'black')
        draw.text((left + line, top + size // 2), text, 'black', font, 'lm')
    return sheet
