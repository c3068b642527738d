# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pixels of very large images: read by window, written by rows."""

from .georeference import ControlPoint, Georeference
from .meta import RasterMeta
from .reader import RasterReader, open_raster
from .vectors import PolygonWriter
from .window import Window
from .writer import GeoTiffWriter, output_nbytes

__all__ = [
    'ControlPoint',
    'GeoTiffWriter',
    'Georeference',
    'PolygonWriter',
    'RasterMeta',
    'RasterReader',
    'Window',
    'open_raster',
    'output_nbytes',
]
