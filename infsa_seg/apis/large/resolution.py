# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""At which resolution a raster is segmented."""

from __future__ import annotations

import re

from infsa_seg.raster import RasterReader, ResampledReader

# Micrometres.
_UNITS = {
    'nm': 1e-3,
    'um': 1.0,
    'µm': 1.0,
    'μm': 1.0,
    'mm': 1e3,
    'cm': 1e4,
    'm': 1e6,
    'km': 1e9,
}
# Resolutions that are taken to be the same.
_SAME = 0.02
# Micrometres per pixel between which scanners of slides are.
_PLAUSIBLE = (0.05, 20)


def parse_resolution(text: str | float) -> float:
    """Micrometres per pixel, of text such as '0.5um' or '30cm'.

    Raises:
        ValueError: It has no unit, or is not positive.
    """
    match = re.fullmatch(r'\s*(\d*\.?\d+)\s*([a-zµμ]+)\s*', str(text).lower())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if size <= 0:
        raise ValueError(
            f'{text!r} is no size of a pixel; write one such as 0.5um or 30cm'
        )
    return size


def at_resolution(
    reader: RasterReader,
    res: str | None,
    level: int | None,
    mpp: float | None,
) -> tuple[RasterReader, list[str]]:
    """Read a raster at a resolution.

    Args:
        reader (RasterReader): Of the full resolution.
        res (str, optional): Size of a pixel, such as '0.5um' or '30cm'.
        level (int, optional): Of the raster's pyramid, in place of ``res``.
        mpp (float, optional): Micrometres per pixel of the full resolution,
            in place of what the file says.

    Returns:
        The reader, and what people should know of it.

    Raises:
        ValueError: The file does not say its resolution, has no such level,
            or has larger pixels.
    """
    meta = reader.meta
    notes: list[str] = []
    have = meta.mpp
    if mpp is not None:
        have = (mpp, mpp)
    is_asked = res is not None or mpp is not None
    if have is not None and meta.georeference is None and is_asked:
        low, high = _PLAUSIBLE
        if not all(low <= side <= high for side in have):
            notes.append(
                f'{_text(have[0])} per pixel is not what scanners of slides '
                'give; state it with --mpp-override if it is wrong'
            )
    sizes = meta.level_sizes
    if level is not None:
        if not 0 <= level < len(sizes):
            raise ValueError(
                f'has no level {level}, but 0 to {len(sizes) - 1}'
            )
        size = sizes[level]
    elif res is not None:
        if have is None:
            raise ValueError(
                'does not say its resolution, which --res needs; state it '
                'with --mpp-override'
            )
        size = _size_at(meta.height, meta.width, have, res, sizes)
    else:
        size = sizes[0]
    if size != sizes[0] or mpp is not None:
        reader = ResampledReader(reader, *size, mpp=have)
    return reader, notes


def _size_at(
    height: int,
    width: int,
    have: tuple[float, float],
    res: str,
    sizes: tuple[tuple[int, int], ...],
) -> tuple[int, int]:
    wanted = parse_resolution(res)
    if wanted < max(have) * (1 - _SAME):
        raise ValueError(
            f'has {_text(max(have))} per pixel, --res {res} is finer; use '
            f'{_text(max(have))} or more'
        )
    for size in sizes:
        found = height / size[0] * have[0], width / size[1] * have[1]
        if all(abs(side / wanted - 1) <= _SAME for side in found):
            return size
    return (
        min(max(round(height * have[0] / wanted), 1), height),
        min(max(round(width * have[1] / wanted), 1), width),
    )


def _text(size: float) -> str:
    """A size in micrometres as people write it."""
    for unit, factor in (('m', 1e6), ('cm', 1e4), ('mm', 1e3)):
        if size >= factor:
            return f'{size / factor:.4g}{unit}'
    return f'{size:.4g}um'
