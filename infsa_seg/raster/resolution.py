# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How large a pixel is, in the ways that files say it.

All sizes are micrometres per pixel, (down, across). Whatever is missing,
broken or absurd says nothing: None.
"""

from __future__ import annotations

import math
from xml.etree import ElementTree

from .georeference import Affine, Georeference

Mpp = tuple[float, float]

# Micrometres of the units that OME allows, and of the names others use.
_MICROMETRES = {
    'pm': 1e-6,
    'Å': 1e-4,
    'nm': 1e-3,
    **dict.fromkeys(('µm', 'um', 'micron', 'microns', 'micrometer'), 1.0),
    'mm': 1e3,
    'cm': 1e4,
    'dm': 1e5,
    'm': 1e6,
    'km': 1e9,
    'thou': 25.4,
    'pt': 25400 / 72,
    **dict.fromkeys(('in', 'inch'), 25400.0),
    'ft': 304800.0,
    'yd': 914400.0,
}
# ResolutionUnit of TIFF: 1 is none.
_TIFF_UNITS = {2: 'inch', 3: 'cm'}
# Micrometres. Beyond, a tag is a placeholder, as 1 pixel per inch is.
_SMALLEST, _LARGEST = 1e-5, 1e4


def mpp_of_values(down: float | None, across: float | None) -> Mpp | None:
    """Two sizes of a pixel, if both can be."""
    if down is None or across is None:
        return None
    sizes = (float(down), float(across))
    if all(_SMALLEST < size < _LARGEST for size in sizes):
        return sizes
    return None


def mpp_of_tags(x: object, y: object, unit: object) -> Mpp | None:
    """What the resolution tags of a TIFF say.

    Args:
        x: XResolution, pixels per unit: (numerator, denominator), a number,
            or its text; None if there is no such tag.
        y: YResolution.
        unit: ResolutionUnit: 1 none, 2 inch, 3 centimetre. Without it, the
            standard has inch, but those who leave it out mean nothing by it.
    """
    number = _number(unit)
    name = None if number is None else _TIFF_UNITS.get(int(number))
    if name is None:
        return None
    down, across = _number(y), _number(x)
    if not down or not across:
        return None
    length = _MICROMETRES[name]
    return mpp_of_values(length / down, length / across)


def mpp_of_ome(xml: str | None) -> Mpp | None:
    """What the metadata of OME say of the first image.

    Args:
        xml: ``PhysicalSizeX`` and ``PhysicalSizeY`` of ``Pixels`` are its
            sizes, in micrometres if no unit stands beside them.
    """
    if not xml:
        return None
    try:
        elements = ElementTree.fromstring(xml.encode()).iter()
    except ElementTree.ParseError:
        return None
    for element in elements:
        # Each version of the schema has a name space of its own.
        if element.tag.rpartition('}')[2] == 'Pixels':
            return mpp_of_values(
                _ome_size(element, 'PhysicalSizeY'),
                _ome_size(element, 'PhysicalSizeX'),
            )
    return None


def mpp_of_aperio(description: str) -> Mpp | None:
    """What Aperio says in the description of a page: ``|MPP = 0.4990|``."""
    if not description.startswith('Aperio'):
        return None
    for item in description.split('|')[1:]:
        name, _, value = item.partition('=')
        if name.strip() == 'MPP':
            return mpp_of_values(_number(value), _number(value))
    return None


def mpp_of_transform(
    transform: Affine | None, metres: float | None
) -> Mpp | None:
    """What the place on earth says: the lengths of the sides of a pixel.

    Args:
        transform: as of :class:`Georeference`.
        metres: per unit of the coordinates; None where they are degrees.
    """
    if transform is None or metres is None:
        return None
    a, b, _, d, e, _ = transform
    down, across = (1e6 * metres * math.hypot(*s) for s in ((b, e), (a, d)))
    if all(0 < size < math.inf for size in (down, across)):
        return down, across
    return None


def mpp_of_georeference(place: Georeference | None) -> Mpp | None:
    """The same, of coordinates in a projection."""
    if place is None or place.crs is None:
        return None
    from rasterio.crs import CRS

    crs = CRS.from_wkt(place.crs)
    metres = crs.linear_units_factor[1] if crs.is_projected else None
    return mpp_of_transform(place.transform, metres)


def _ome_size(element: ElementTree.Element, name: str) -> float | None:
    value = _number(element.get(name))
    unit = element.get(f'{name}Unit', 'µm').strip()
    # The Greek letter and the sign look the same.
    length = _MICROMETRES.get(unit.replace('\u03bc', '\u00b5'))
    return None if value is None or length is None else value * length


def _number(value: object) -> float | None:
    """A number out of a tag or a text, if it is one."""
    try:
        if isinstance(value, tuple):
            return float(value[0]) / float(value[1])
        if isinstance(value, str):
            # GDAL writes out what it means: "2 (pixels/inch)".
            value = value.strip().partition(' ')[0]
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError, IndexError):
        return None
    return number if math.isfinite(number) else None
