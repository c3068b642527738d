# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How a large image is segmented or classified."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from infsa_seg.execution import parse_bytes
from infsa_seg.raster import READERS

from ..pictures import Palette
from .resolution import parse_resolution

DTYPES = {
    'fp32': torch.float32,
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
}
PROBS = {'uint8': np.uint8, 'float16': np.float16}
STORES = ('auto', 'ram', 'disk')
AREAS = ('csv', 'json')
POLYGONS = ('geojson', 'gpkg')
# For the arguments of the tool.
large_choices = {
    'store': STORES,
    'dtype': tuple(DTYPES),
    'probs': tuple(PROBS),
    'areas': AREAS,
    'polygons': POLYGONS,
    'reader': READERS,
}


@dataclasses.dataclass(frozen=True)
class LargeOptions:
    """How a large image is segmented or classified.

    Attributes:
        max_memory (str | int): What the process may take, such as ``'4GiB'``,
            weights included.
        store (str): Where tokens wait between sweeps: 'ram', 'disk', or
            'auto', memory if there is enough.
        scratch (str | Path, optional): Directory for tokens on disk. A
            directory of each image's own is made in it, and removed at the
            end. Defaults to that of the mask.
        dtype (str): Of the computation, 'fp32', 'bf16' or 'fp16'.
        store_dtype (str, optional): Of the tokens between sweeps; defaults to
            ``dtype``.
        band_rows (int, optional): Token rows of a band. Defaults to what fits
            into memory.
        probs (str, optional): Write class probabilities too, 'uint8' (255 is
            certain) or 'float16'.
        centrality (bool): Write how much each token receives from all others
            in the last attention, 1 being the average. A classifier does it
            anyway, and takes no option that asks for a class of each pixel.
        areas (str, optional): Write a table of pixels and area per class,
            'csv' or 'json'.
        polygons (str, optional): Write the areas of each class as polygons,
            'geojson' or 'gpkg'. Those of slides are in pixels of the full
            resolution, as QuPath reads them.
        min_area (float): Polygons, and holes, that are smaller are left out;
            in square metres, micrometres of slides, or pixels.
        simplify (float): By how much an outline may be moved to make it
            simpler, in the units of its coordinates.
        style (bool): Write a style of the classes for QGIS.
        manifest (bool): Write what was computed from what, as JSON.
        pyramid (bool, optional): Add overviews to the mask. Defaults to
            whether the image has some and is no map.
        cog (bool): Make the mask a cloud-optimised GeoTIFF.
        overview (bool): Write a PNG of the image under its classes.
        palette (sequence, optional): One (red, green, blue) per class, in
            place of the model's.
        labels (str | Path, optional): Directory with the true class indices,
            NAME.png or NAME.tif.
        reader (str): By what the file is read, one of
            ``infsa_seg.raster.READERS``; 'auto' looks into it.
        res (str, optional): Size of a pixel at which the image is segmented,
            such as '0.5um' or '30cm'. Defaults to that of the file.
        level (int, optional): Of a pyramid, in place of ``res``.
        mpp_override (float, optional): Micrometres per pixel of the full
            resolution, in place of what the file says.
        tissue (str | Path, optional): Where a slide has tissue; glass is not
            valid. 'auto' finds it, 'none' does not, and the path of a raster
            tells it: tissue where it is not 0. Defaults to 'none'.
        stretch (sequence, optional): Two percentiles of the image's values
            in each channel, that become 0 and 255 before the model's own
            normalisation. Values beyond are cut off.
        tolerate_damage (bool): Blocks that cannot be read are not valid;
            without it they end the run.
        nodata (float, optional): A pixel is not valid where all channels have
            this value. Defaults to what the file says itself.
        channels (sequence, optional): Numbers of the channels to use, from 1
            on, in the order in which the model takes them.
        verify (int, optional): Run again with other bands, and compare the
            logits of so many rows of pixels in the middle; of a classifier,
            those of the image.
        overwrite (bool): Replace files that exist.
        resume (bool): Go on from what a killed run left on disk.

    Raises:
        ValueError: A value is none of these.
    """

    max_memory: str | int = '4GiB'
    store: str = 'auto'
    scratch: str | Path | None = None
    dtype: str = 'fp32'
    store_dtype: str | None = None
    band_rows: int | None = None
    probs: str | None = None
    centrality: bool = False
    areas: str | None = None
    polygons: str | None = None
    min_area: float = 0.0
    simplify: float = 0.0
    style: bool = False
    manifest: bool = False
    pyramid: bool | None = None
    cog: bool = False
    overview: bool = False
    palette: Palette | None = None
    labels: str | Path | None = None
    reader: str = 'auto'
    res: str | None = None
    level: int | None = None
    mpp_override: float | None = None
    tissue: str | Path | None = None
    stretch: Sequence[float] | None = None
    tolerate_damage: bool = False
    nodata: float | None = None
    channels: Sequence[int] | None = None
    verify: int | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.max_memory)
        for name, known in (
            ('store', STORES),
            ('dtype', tuple(DTYPES)),
            ('store_dtype', (None, *DTYPES)),
            ('probs', (None, *PROBS)),
            ('areas', (None, *AREAS)),
            ('polygons', (None, *POLYGONS)),
            ('reader', READERS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f'{name}={value!r} is unknown; use one of {known}'
                )
        for name in ('band_rows', 'verify'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}={value}: give 1 or more')
        for name in ('min_area', 'simplify'):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f'{name}={value}: give 0 or more')
        if self.res is not None:
            parse_resolution(self.res)
            if self.level is not None:
                raise ValueError('give either res or level, not both')
        if self.mpp_override is not None and not 0 < self.mpp_override < 1e12:
            raise ValueError(
                f'mpp_override={self.mpp_override}: give micrometres'
            )
        if self.stretch is not None:
            low, high = (*self.stretch, 0, 0)[:2]
            if len(self.stretch) != 2 or not 0 <= low < high <= 100:
                raise ValueError(
                    f'stretch={tuple(self.stretch)}: give two percentiles '
                    'such as 2,98'
                )
