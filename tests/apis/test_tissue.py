# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Tissue is found, and glass is left out."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from infsa_seg.apis.large import LargeOptions, open_source
from infsa_seg.apis.large.tissue import TissueReader, find_tissue, read_tissue
from infsa_seg.raster import Window, open_raster

HE = Path(__file__).parents[3] / 'shared' / 'data' / 'wsi' / 'he_1000.png'


def slide(tmp_path, spots=((100, 100, 60), (300, 400, 40)), dtype=np.uint8):
    """Glass that is not quite white, and spots that are pink."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(236, 246, (500, 600, 3))
    inside = np.zeros((500, 600), np.uint8)
    for row, col, radius in spots:
        cv2.circle(inside, (col, row), radius, 1, -1)
    count = int(inside.sum())
    pixels[inside == 1] = rng.integers(
        (170, 80, 130), (230, 140, 190), (count, 3)
    )
    np.save(tmp_path / 'slide.npy', pixels.astype(dtype))
    return tmp_path / 'slide.npy', inside == 1


def test_spots_are_found(tmp_path):
    path, inside = slide(tmp_path)
    with open_raster(path) as reader:
        found = find_tissue(reader)
    assert found.shape == inside.shape
    assert found[inside].mean() > 0.99
    # A margin is left, and no more.
    wide = cv2.dilate(inside.astype(np.uint8), np.ones((25, 25))) == 1
    assert not found[~wide].any()


def test_a_large_slide_is_looked_at_from_afar(tmp_path):
    pixels = np.full((3000, 8200, 3), 240, np.uint8)
    pixels[1000:2000, 4000:6000] = 200, 90, 160
    np.save(tmp_path / 'a.npy', pixels)
    with open_raster(tmp_path / 'a.npy') as reader:
        found = find_tissue(reader)
    assert max(found.shape) <= 2048
    assert found.mean() == pytest.approx(2e6 / pixels[..., 0].size, rel=0.1)


def test_bare_glass_is_no_tissue(tmp_path):
    path, _ = slide(tmp_path, ())
    with open_raster(path) as reader:
        assert not find_tissue(reader).any()


@pytest.mark.skipif(not HE.exists(), reason='the shared data are not there')
def test_a_stained_section(tmp_path):
    """Of real tissue most is found, beside glass that was put there."""
    picture = cv2.imread(str(HE))[:, :, ::-1]
    sheet = np.full((1000, 2000, 3), 243, np.uint8)
    sheet[:, :1000] = picture
    np.save(tmp_path / 'a.npy', sheet)
    with open_raster(tmp_path / 'a.npy') as reader:
        found = find_tissue(reader)
    assert found[:, :980].mean() > 0.8
    assert not found[:, 1020:].any()


def test_other_channels_need_a_mask(tmp_path):
    path, _ = slide(tmp_path, dtype=np.uint16)
    with (
        open_raster(path) as reader,
        pytest.raises(ValueError, match='give --tissue MASK'),
    ):
        find_tissue(reader)


@pytest.mark.parametrize('size', [(50, 60), (500, 600), (7, 9)])
def test_a_mask_that_is_given(size, tmp_path):
    path, inside = slide(tmp_path)
    small = cv2.resize(inside.astype(np.uint8), size[::-1])
    cv2.imwrite(str(tmp_path / 'mask.png'), 7 * small)
    with open_raster(path) as reader:
        found = read_tissue(tmp_path / 'mask.png', reader)
    assert np.array_equal(found, small != 0)


def test_masks_that_do_not_fit(tmp_path):
    path, _ = slide(tmp_path)
    for shape in ((50, 50), (50, 60, 3)):
        cv2.imwrite(str(tmp_path / 'mask.png'), np.zeros(shape, np.uint8))
        with (
            open_raster(path) as reader,
            pytest.raises(ValueError, match=r'mask\.png: 50x.* of tissue has'),
        ):
            read_tissue(tmp_path / 'mask.png', reader)


def test_only_tissue_is_valid_and_glass_is_not_read(tmp_path):
    """Any window, whatever the size of the mask; NaN in tissue too."""
    rng = np.random.default_rng(0)
    pixels = rng.random((90, 70, 1)).astype(np.float32)
    pixels[40:50, 30:35] = np.nan
    np.save(tmp_path / 'a.npy', pixels)
    mask = np.zeros((9, 7), bool)
    mask[3:6, 2:5] = True
    expected = mask.repeat(10, 0).repeat(10, 1) & ~np.isnan(pixels[..., 0])
    with open_raster(tmp_path / 'a.npy') as plain:
        asked = []
        reader = TissueReader(plain, mask)
        plain_valid = plain.read_valid
        plain.read_valid = lambda window, level=0: (
            asked.append(window) or plain_valid(window, level)
        )
        whole = reader.read_valid(Window(0, 0, 90, 70))
        assert np.array_equal(whole, expected)
        assert asked == [Window(0, 20, 90, 30)]
        assert not reader.read_valid(Window(0, 0, 30, 70)).any()
        assert len(asked) == 1
        part = Window(33, 11, 40, 22)
        assert np.array_equal(reader.read_valid(part), expected[part.slices])
        assert not reader.meta.all_valid


def test_a_pyramid_is_decimated_by_its_levels(tmp_path, monkeypatch):
    """Of the full resolution nothing is decoded for it, whatever --res."""
    pixels = np.full((4096, 4096, 3), 240, np.uint8)
    pixels[1000:2000, 1000:3000] = 200, 90, 160
    options = dict(
        tile=(256, 256),
        photometric='rgb',
        resolution=(4e4, 4e4),
        resolutionunit='CENTIMETER',
    )
    with tifffile.TiffWriter(tmp_path / 'a.tif') as writer:
        writer.write(pixels, subifds=1, **options)
        writer.write(pixels[::2, ::2], subfiletype=1, **options)
    with open_raster(tmp_path / 'a.tif') as reader:
        expected = find_tissue(reader)
        levels = []
        plain = reader.read
        monkeypatch.setattr(
            reader,
            'read',
            lambda window, level=0: (
                levels.append(level) or plain(window, level)
            ),
        )
        options = LargeOptions(res='0.3um', tissue='auto')
        with open_source(None, reader, options) as source:
            assert np.array_equal(source.tissue, expected)
            assert source.reader.meta.height == round(4096 * 0.25 / 0.3)
        assert set(levels) == {1}
