# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a file that is to be written will look like, and its size."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

# The last level may have this height and width, or those of one tile.
_SMALLEST = 512
# Where a classic TIFF ends.
_CLASSIC_NBYTES = 2**32
# Offset and size of a block, and what compression and GDAL's layout add.
_NBYTES_PER_BLOCK = 64
# Colours, coordinates and tags.
_NBYTES_OF_TAGS = 2**20
# Side of the tiles of overviews where GDAL does not like ours.
_OVERVIEW_TILE = 128
# What the worst content becomes: codes of 12 bits for 8.
_LZW_GROWTH, _OTHER_GROWTH = 1.5, 1.001

Sizes = list[tuple[int, int]]


def class_map_type(num_classes: int) -> tuple[np.dtype, int]:
    """The type of a map of class indices, and its value of nodata.

    Args:
        num_classes: The classes are 0 to ``num_classes - 1``.

    Returns:
        uint8 and 255, or uint16 and 65535: never a class.

    Raises:
        ValueError: There is no class, or more than 65535.
    """
    for dtype in (np.dtype(np.uint8), np.dtype(np.uint16)):
        nodata = int(np.iinfo(dtype).max)
        if 1 <= num_classes <= nodata:
            return dtype, nodata
    raise ValueError(
        f'a map of {num_classes} classes cannot be written; it may have 1 to '
        '65535'
    )


def level_factors(height: int, width: int, tile: int = 256) -> list[int]:
    """By how much smaller each overview is than the full resolution.

    Args:
        height, width: Of the full resolution in pixels.
        tile: Side of a tile in pixels.

    Returns:
        2, 4, 8, ...; none if the raster is small itself.
    """
    factors, factor = [], 1
    while -(-max(height, width) // factor) > max(_SMALLEST, tile):
        factor *= 2
        factors.append(factor)
    return factors


def level_sizes(height: int, width: int, tile: int = 256) -> Sizes:
    """(height, width) of each level, the full resolution first.

    Args:
        height, width, tile: As for :func:`level_factors`.
    """
    return [
        (-(-height // factor), -(-width // factor))
        for factor in [1, *level_factors(height, width, tile)]
    ]


def output_nbytes(
    height: int,
    width: int,
    channels: int,
    dtype: npt.DTypeLike,
    pyramid: bool = False,
    cog: bool = False,
) -> int:
    """Bytes that writing a raster takes on the disk before compression.

    Args:
        height, width: In pixels.
        channels: Values per pixel.
        dtype: Type of the values.
        pyramid: With overviews, which are about a third more.
        cog: With overviews, and twice, for it is copied at the end. The copy
            alone remains.
    """
    sizes = [(height, width)]
    if pyramid or cog:
        sizes = level_sizes(height, width)
    pixels = sum(h * w for h, w in sizes) * (2 if cog else 1)
    return pixels * channels * np.dtype(dtype).itemsize


def most_nbytes(
    sizes: Sizes, pixel_nbytes: int, tile: int, compress: str
) -> int:
    """Size in bytes that a tiled file cannot exceed, whatever the pixels are.

    Args:
        sizes: (height, width) of its levels.
        pixel_nbytes: Bytes of all channels of a pixel.
        tile: Side of a tile in pixels.
        compress: As for :class:`~.writer.GeoTiffWriter`.
    """
    growth = _LZW_GROWTH if compress == 'lzw' else _OTHER_GROWTH
    nbytes: float = _NBYTES_OF_TAGS
    for level, size in enumerate(sizes):
        # GDAL makes overviews with tiles of its own if ours are unusual.
        sides = (tile, _OVERVIEW_TILE) if level else (tile,)
        blocks = {
            side: math.prod(-(-length // side) for length in size)
            for side in sides
        }
        pixels = max(number * side**2 for side, number in blocks.items())
        # One block for each channel at worst.
        tables = max(blocks.values()) * _NBYTES_PER_BLOCK
        nbytes += (pixels * growth + tables) * pixel_nbytes
    return int(nbytes)


def create_options(
    sizes: Sizes,
    channels: int,
    dtype: np.dtype,
    nodata: float | None,
    compress: str,
    tile: int,
) -> dict[str, Any]:
    """With what rasterio is to create a GeoTIFF.

    Args:
        sizes: (height, width) of its levels. It is BigTIFF from the start if
            they might not find place in a classic one.
        channels: Values per pixel.
        dtype: Type of the values. float16 is made of GDAL's float32.
        nodata, compress, tile: As for :class:`~.writer.GeoTiffWriter`.
    """
    nbytes = most_nbytes(sizes, channels * dtype.itemsize, tile, compress)
    half = dtype == np.float16
    predicted = dtype.kind == 'f' and compress != 'none'
    return {
        **({'NBITS': 16} if half else {}),
        # GDAL takes the fourth for an opacity otherwise.
        **({'photometric': 'MINISBLACK'} if channels == 4 else {}),
        'driver': 'GTiff',
        'height': sizes[0][0],
        'width': sizes[0][1],
        'count': channels,
        # GDAL knows half precision as a width of float32 only.
        'dtype': 'float32' if half else dtype.name,
        'nodata': nodata,
        'tiled': True,
        'blockxsize': tile,
        'blockysize': tile,
        'compress': compress,
        # Differences help numbers that vary slowly, not class indices.
        'predictor': 3 if predicted else 1,
        # Many channels of a tile would be one very large block.
        'interleave': 'pixel' if channels <= 4 else 'band',
        'BIGTIFF': 'YES' if nbytes > _CLASSIC_NBYTES else 'NO',
    }


def resolution_tags(down: float, across: float) -> dict[str, str]:
    """Tags of TIFF, by GDAL's names, for micrometres per pixel."""
    return {
        'TIFFTAG_XRESOLUTION': repr(1e4 / across),
        'TIFFTAG_YRESOLUTION': repr(1e4 / down),
        'TIFFTAG_RESOLUTIONUNIT': '3',  # centimetres
    }
