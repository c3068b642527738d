# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Colours and names of classes, as QGIS shows them."""

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from .hidden import reserve

# The long-term release whose form of a style this is; later ones read it.
_VERSION = '3.22.0'
# What XML cannot have, however it is written.
_FORBIDDEN = re.compile('[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')


def write_qml(
    path: str | Path,
    class_names: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    nodata: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write the style of a class map, with the classes in its legend.

    QGIS uses it by itself for the raster beside it: ``a.qml`` for ``a.tif``.

    Args:
        path: Where the style belongs; it appears there when complete. Its
            directory is made if need be.
        class_names: One for each class, of any characters. Those that XML
            cannot have become U+FFFD.
        palette: One (red, green, blue) for each class, 0 to 255.
        nodata: The value of pixels that are not valid; it is transparent.
        overwrite: Whether ``path`` may exist.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is not set.
        OSError: It cannot be written.
        ValueError: Names and colours are not as many, a colour is none, or
            nodata is a class.
    """
    path = Path(path)
    if len(class_names) != len(palette):
        raise ValueError(
            f'{path}: {len(class_names)} classes cannot have '
            f'{len(palette)} colours'
        )
    for colour in palette:
        if len(colour) != 3 or not all(0 <= part <= 255 for part in colour):
            raise ValueError(
                f'{path}: {tuple(colour)} is no colour; give red, green and '
                'blue from 0 to 255'
            )
    if nodata is not None and 0 <= nodata < len(class_names):
        raise ValueError(f'{path}: nodata={nodata} is a class')
    tree = ElementTree.ElementTree(_style(class_names, palette, nodata))
    ElementTree.indent(tree)
    part = reserve(path, overwrite)
    try:
        tree.write(part, encoding='utf-8', xml_declaration=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _style(
    class_names: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    nodata: int | None,
) -> ElementTree.Element:
    root = ElementTree.Element(
        'qgis', version=_VERSION, styleCategories='AllStyleCategories'
    )
    pipe = ElementTree.SubElement(root, 'pipe')
    renderer = ElementTree.SubElement(
        pipe,
        'rasterrenderer',
        type='paletted',
        band='1',
        opacity='1',
        alphaBand='-1',
        nodataColor='',
    )
    ElementTree.SubElement(renderer, 'rasterTransparency')
    entries = ElementTree.SubElement(renderer, 'colorPalette')
    rows = [
        (index, name, tuple(colour), 255)
        for index, (name, colour) in enumerate(
            zip(class_names, palette, strict=True)
        )
    ]
    if nodata is not None:
        rows.append((nodata, 'no data', (0, 0, 0), 0))
    for value, name, (red, green, blue), alpha in rows:
        ElementTree.SubElement(
            entries,
            'paletteEntry',
            value=str(value),
            label=_FORBIDDEN.sub('\ufffd', name),
            color=f'#{red:02x}{green:02x}{blue:02x}',
            alpha=str(alpha),
        )
    ElementTree.SubElement(pipe, 'rasterresampler', maxOversampling='2')
    ElementTree.SubElement(root, 'blendMode').text = '0'
    return root
