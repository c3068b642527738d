# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Windows, and pictures to read them from."""

import numpy as np
import pytest
from hypothesis import strategies as st

from infsa_seg.raster import Window

HEIGHT, WIDTH = 75, 110


@st.composite
def windows(draw, height=HEIGHT, width=WIDTH):
    """A window within a picture of this size."""
    row = draw(st.integers(0, height - 1))
    col = draw(st.integers(0, width - 1))
    return Window(
        row,
        col,
        draw(st.integers(1, height - row)),
        draw(st.integers(1, width - col)),
    )


def noise(*shape, dtype=np.uint8):
    """Values of any type that compress a little."""
    values = np.random.default_rng(7).integers(0, 200, shape)
    return values.astype(dtype)


def whole(reader):
    """The window of everything."""
    return Window(0, 0, reader.meta.height, reader.meta.width)


def random_windows(size, count=8, seed=0):
    """Windows within a picture of this size, the whole of it among them."""
    random = np.random.default_rng(seed)
    found = [Window(0, 0, *size)]
    for _ in range(count):
        row, col = (int(random.integers(0, n)) for n in size)
        height = int(random.integers(1, size[0] - row + 1))
        width = int(random.integers(1, size[1] - col + 1))
        found.append(Window(row, col, height, width))
    return found


def smooth(height, width):
    """Colours that change slowly, as JPEG and interpolation like them."""
    row, col = np.mgrid[:height, :width]
    waves = (
        np.sin(col / 17 + row / 31),
        np.cos(col / 23 - row / 11),
        np.sin(col / 41) * np.cos(row / 37),
    )
    return (127 + 100 * np.stack(waves, -1)).astype(np.uint8)


def check_windows(reader, level, whole, valid=None):
    """A level read by window is what it is as a whole, bit for bit."""
    for window in random_windows(reader.meta.level_sizes[level]):
        pixels = reader.read(window, level)
        assert pixels.dtype == reader.meta.dtype
        assert pixels.flags.c_contiguous
        assert np.array_equal(pixels, whole[window.slices], equal_nan=True)
        told = reader.read_valid(window, level)
        if valid is None:
            assert told is None
        else:
            assert np.array_equal(told, valid[window.slices])


def write_cog(path, pixels, valid=None, **how):
    """A cloud optimised GeoTIFF as GDAL writes it, with overviews.

    Args:
        path: The file.
        pixels: (height, width, channels).
        valid: bool (height, width), to be kept as masks.
        how: nodata, crs, transform.
    """
    rasterio = pytest.importorskip('rasterio')
    from rasterio.shutil import copy

    height, width, count = pixels.shape
    form = dict(driver='GTiff', height=height, width=width, count=count)
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.MemoryFile() as memory,
    ):
        with memory.open(**form, dtype=pixels.dtype, **how) as file:
            file.write(np.moveaxis(pixels, 2, 0))
            if valid is not None:
                file.write_mask(valid)
        with memory.open() as file:
            copy(file, path, driver='COG', BLOCKSIZE=128, COMPRESS='DEFLATE')
