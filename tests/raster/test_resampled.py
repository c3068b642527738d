# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pixels of another resolution: means of areas, whatever the windows."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.raster import (
    Georeference,
    ResampledReader,
    Window,
    open_raster,
    resampled,
)
from infsa_seg.raster.base import WindowReader, valid_pixels
from infsa_seg.raster.meta import RasterMeta


class Levels(WindowReader):
    """Arrays as a pyramid."""

    def __init__(self, arrays, nodata=None, **meta):
        super().__init__('array')
        self.arrays = arrays
        height, width, channels = arrays[0].shape
        self.read_at = []
        self.meta = RasterMeta(
            *(height, width, channels, arrays[0].dtype, nodata),
            level_sizes=tuple(array.shape[:2] for array in arrays),
            **meta,
        )

    def _load(self, window, level):
        self.read_at.append(level)
        pixels = self.arrays[level][window.slices].copy()
        return pixels, valid_pixels(pixels, self.meta.nodata)


def weights(few, many):
    """How much of each finer pixel lies in each coarse one, exactly."""
    rows = [[Fraction(0)] * many for _ in range(few)]
    for i in range(few):
        low, high = Fraction(i * many, few), Fraction((i + 1) * many, few)
        for j in range(many):
            rows[i][j] = max(min(j + 1, high) - max(j, low), 0) / (high - low)
    return np.array(rows, np.float64)


@given(
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    scale=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
    kind=st.sampled_from(['uint8', 'uint16', 'int16', 'float32']),
    nodata=st.booleans(),
    seed=st.integers(0, 99),
)
def test_means_of_areas(size, scale, kind, nodata, seed):
    """Against the weights as fractions; integers rounded, floats 1e-5."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 200, (*size, 2)).astype(kind)
    valid = np.ones(size, bool)
    if nodata:
        valid = rng.random(size) < 0.7
        pixels[~valid] = 250
    source = Levels([pixels], 250 if nodata else None)
    few = [max(round(n * s), 1) for n, s in zip(size, scale, strict=True)]
    reader = ResampledReader(source, *few)
    whole = Window(0, 0, *few)
    found, known = reader.read(whole), reader.read_valid(whole)
    down, across = (weights(*n) for n in zip(few, size, strict=True))
    shares = down @ valid @ across.T
    known_values = np.where(valid[..., None], pixels, 0.0)
    sums = np.einsum('ij,jkc,lk->ilc', down, known_values, across)
    means = sums / np.maximum(shares, 1e-9)[..., None]
    # Halves are rounded to either side.
    inside = shares > 0.5 + 1e-6
    close = 0.5001 if found.dtype.kind in 'ui' else 1e-3
    assert found.dtype == kind
    assert np.abs(found - means)[inside].max(initial=0) <= close
    if tuple(few) != size and nodata:
        assert known[inside].all() and not known[shares < 0.5 - 1e-6].any()
        assert (found[~known] == 0).all()
    # Any window gives the same pixels, bit for bit.
    row, col = rng.integers(0, few[0]), rng.integers(0, few[1])
    part = Window(
        *(int(row), int(col)),
        int(rng.integers(1, few[0] - row + 1)),
        int(rng.integers(1, few[1] - col + 1)),
    )
    assert np.array_equal(reader.read(part), found[part.slices])
    if known is not None:
        assert np.array_equal(reader.read_valid(part), known[part.slices])


def test_nothing_depends_on_the_strips(monkeypatch):
    rng = np.random.default_rng(0)
    source = Levels([rng.integers(0, 255, (90, 70, 3)).astype(np.uint8)])
    whole = Window(0, 0, 41, 33)
    plain = ResampledReader(source, 41, 33).read(whole)
    calls = len(source.read_at)
    monkeypatch.setattr(resampled, '_STRIP_BYTES', 1000)
    assert np.array_equal(ResampledReader(source, 41, 33).read(whole), plain)
    assert len(source.read_at) > calls + 10


def test_the_next_finer_level_is_read():
    source = Levels(
        [np.full((n, n, 1), n, np.uint8) for n in (100, 50, 24)],
        mpp=(0.25, 0.5),
        georeference=Georeference(None, (2.0, 0.0, 7.0, 0.0, -2.0, 9.0)),
    )
    for size, level in ((100, 0), (51, 0), (50, 1), (30, 1), (24, 2), (1, 2)):
        reader = ResampledReader(source, size, size)
        value = reader.read(Window(0, 0, 1, 1))
        assert value.item() == (100, 50, 24)[level], size
        assert source.read_at[-1] == level
    reader = ResampledReader(source, 40, 25)
    assert reader.meta.mpp == (0.625, 2.0)
    assert reader.meta.georeference.transform == (8, 0, 7, 0, -5, 9)
    with pytest.raises(ValueError, match='cannot be read as 101x100'):
        ResampledReader(source, 101, 100)
    with pytest.raises(ValueError, match='has no level 1'):
        reader.read(Window(0, 0, 1, 1), 1)


def test_of_a_file(tmp_path):
    """It is closed and opened again like the reader it stands for."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (64, 64, 3)).astype(np.uint8)
    np.save(tmp_path / 'a.npy', pixels)
    with ResampledReader(open_raster(tmp_path / 'a.npy'), 32, 32) as reader:
        found = reader.read(Window(0, 0, 32, 32))
    means = pixels.reshape(32, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(found - means).max() <= 0.5
    assert np.array_equal(reader.read(Window(0, 0, 32, 32)), found)
    reader.close()
