# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Images of any size, in a set amount of memory."""

from .infer_large import (
    LargeResults,
    infer_large,
    infer_large_image,
    plan_large_image,
)
from .job import LargeResult
from .options import LargeOptions, large_choices
from .raster_image import RasterImage, valid_window
from .sources import Source, open_source, stem_of

__all__ = [
    'LargeOptions',
    'LargeResult',
    'LargeResults',
    'RasterImage',
    'Source',
    'infer_large',
    'infer_large_image',
    'large_choices',
    'open_source',
    'plan_large_image',
    'stem_of',
    'valid_window',
]
