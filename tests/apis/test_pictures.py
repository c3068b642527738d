# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from PIL import Image

from infsa_seg.apis.pictures import read_image, write_mask, write_overlay

PALETTE = [[10, 20, 30], [200, 100, 0]]


def test_mask_keeps_indices_and_shows_colours(tmp_path):
    mask = np.array([[0, 1, 1], [1, 0, 0]])
    write_mask(tmp_path / 'mask.png', mask, PALETTE)
    with Image.open(tmp_path / 'mask.png') as picture:
        np.testing.assert_array_equal(np.array(picture), mask)
        colours = np.array(picture.convert('RGB'))
    np.testing.assert_array_equal(colours, np.array(PALETTE)[mask])


def test_more_classes_than_colours(tmp_path):
    with pytest.raises(ValueError, match='256 colours, not 300'):
        write_mask(tmp_path / 'mask.png', np.zeros((2, 2)), [[0, 0, 0]] * 300)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('size', [(2, 3), (700, 40)])
def test_overlay(tmp_path, size):
    mask = np.ones(size, int)
    image = np.full((*size, 3), [250, 50, 150], np.uint8)  # blue first
    write_overlay(tmp_path / 'overlay.png', image, mask, ['a', 'b'], PALETTE)
    drawn = read_image(tmp_path / 'overlay.png')
    half_way = [125, 75, 175]
    np.testing.assert_allclose(
        drawn[: size[0], : size[1]],
        np.broadcast_to(half_way, image.shape),
        atol=1,
    )
    legend = drawn[:, size[1] :].reshape(-1, 3).tolist()
    assert PALETTE[1][::-1] in legend
    assert PALETTE[0][::-1] not in legend  # a class that is not there


@pytest.mark.parametrize('content', [b'', b'no picture'])
def test_no_picture(tmp_path, content):
    path = tmp_path / 'x.png'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'x\.png: not a picture'):
        read_image(path)
