# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Smaller copies of a raster inside its file, by which viewers open it fast.

Each has half the height and width of the one before, by nearest neighbour:
a class stays a class, and no value is made up.
"""

from pathlib import Path
from typing import Any

import numpy as np

from .layout import Sizes

# What GDAL holds beside its cache while it makes them.
BUILD_NBYTES = 48 * 2**20


def build_overviews(rasterio: Any, path: Path, factors: list[int]) -> None:
    """Add overviews to a complete file; memory is GDAL's cache and a little.

    Args:
        rasterio: The module, in an environment with a capped cache.
        path: A tiled GeoTIFF.
        factors: Of :func:`~.layout.level_factors`.
    """
    # Opened again: a new file has no colours yet to hand on to them.
    with rasterio.open(path, 'r+') as dataset:
        dataset.build_overviews(factors, rasterio.enums.Resampling.nearest)


def copy_as_cog(
    rasterio: Any, source: Path, target: Path, options: dict[str, Any]
) -> None:
    """Copy a file with its overviews in the order that COG asks for.

    GDAL keeps type, colours, tags, nodata and coordinates of all kinds.
    Channels lie pixel by pixel in the copy, for COG knows no other way.

    Args:
        rasterio: As for :func:`build_overviews`.
        source: A tiled GeoTIFF.
        target: The copy.
        options: With which ``source`` was created.
    """
    predictor = {1: 'NO', 3: 'FLOATING_POINT'}[options['predictor']]
    rasterio.shutil.copy(
        source,
        target,
        driver='COG',
        COMPRESS=options['compress'].upper(),
        PREDICTOR=predictor,
        BLOCKSIZE=options['blockxsize'],
        BIGTIFF=options['BIGTIFF'],
        # Those of the source: none is made again, and none beyond them.
        OVERVIEWS='FORCE_USE_EXISTING',
        OVERVIEW_RESAMPLING='NEAREST',
    )
    if options['count'] == 4:
        _deny_opacity(target)


def _deny_opacity(path: Path) -> None:
    """Say in place that no channel is an opacity, as COG has the fourth."""
    import tifffile

    with tifffile.TiffFile(path, mode='r+') as file:
        for page in file.pages:
            tag = page.tags['ExtraSamples']
            tag.overwrite((0,) * tag.count)


def check_levels(path: Path, sizes: Sizes) -> None:
    """Make sure that a file has all levels, and each of them all blocks.

    Raises:
        ValueError: Something is missing.
    """
    import tifffile

    end = path.stat().st_size
    with tifffile.TiffFile(path) as file:
        found = [(page.imagelength, page.imagewidth) for page in file.pages]
        if found != sizes:
            raise ValueError(f'{path}: has levels {found}, not {sizes}')
        for page in file.pages:
            ends = np.add(page.dataoffsets, page.databytecounts)
            if not all(page.databytecounts) or ends.max() > end:
                raise ValueError(f'{path}: blocks are missing')
