# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pixels of very large images: read by window, written by rows."""

from .base import WrappedReader
from .damage import TolerantReader
from .georeference import ControlPoint, Georeference
from .hidden import staged
from .layout import class_map_type, output_nbytes
from .meta import RasterMeta
from .reader import READERS, RasterReader, open_raster
from .resampled import ResampledReader
from .style import write_qml
from .vectors import PolygonWriter
from .window import Window
from .writer import GeoTiffWriter

__all__ = [
    'READERS',
    'ControlPoint',
    'GeoTiffWriter',
    'Georeference',
    'PolygonWriter',
    'RasterMeta',
    'RasterReader',
    'ResampledReader',
    'TolerantReader',
    'Window',
    'WrappedReader',
    'class_map_type',
    'open_raster',
    'output_nbytes',
    'staged',
    'write_qml',
]
