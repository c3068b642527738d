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
# A line of a legend, and the colour it stands for.
Entry = tuple[str, tuple[int, ...] | None]
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


def write_heat(
    path: str | Path,
    image: np.ndarray,
    heat: np.ndarray,
    titles: Sequence[str],
) -> None:
    """Write a PNG of the image under a map of numbers, with a scale.

    Args:
        path (str | Path): Replaced only when the new file is complete.
        image (np.ndarray): BGR, uint8 (rows, columns, 3).
        heat (np.ndarray): Of 0 or more (rows, columns); NaN where there is
            none. The colours end at its 99th percentile.
        titles (sequence): Lines above the numbers of the scale.
    """
    known = heat[np.isfinite(heat)]
    top = max(float(np.percentile(known, 99)), 1e-12) if known.size else 1.0
    levels = np.nan_to_num(heat / top).clip(0, 1)
    rgb = image[..., ::-1]
    colours = cv2.addWeighted(
        rgb, 1 - OPACITY, _colours_of(levels), OPACITY, gamma=0
    )
    blend = np.where(np.isnan(heat)[..., None], rgb, colours)
    entries: list[Entry] = [(title, None) for title in titles]
    if known.size:
        steps = np.linspace(1, 0, 5)
        shades = _colours_of(steps[None])[0].tolist()
        entries += [
            (f'{step * top:.3g}', tuple(shade))
            for step, shade in zip(steps, shades, strict=True)
        ]
    with atomic_path(path) as part:
        sheet = _beside(Image.fromarray(blend), entries)
        sheet.save(part, format='PNG')


def _colours_of(levels: np.ndarray) -> np.ndarray:
    """RGB of numbers from 0 to 1, (rows, columns, 3)."""
    bytes_ = np.rint(255 * levels).astype(np.uint8)
    bgr = cv2.applyColorMap(bytes_, cv2.COLORMAP_VIRIDIS)
    return np.ascontiguousarray(bgr[..., ::-1])


def _beside(
    picture: Image.Image,
    entries: Sequence[Entry],
) -> Image.Image:
    """Add a column with a text, and a square of its colour, for each entry."""
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
        place = left
        if colour is not None:
            square = (left, top, left + size, top + size)
            draw.rectangle(square, colour, 'black')
            place += line
        draw.text((place, top + size // 2), text, 'black', font, 'lm')
    return sheet
