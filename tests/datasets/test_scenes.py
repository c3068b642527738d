# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infsa_seg.datasets.scenes import PAINTERS, Scene, land_cover, legend
from infsa_seg.datasets.scenes import scene as drawing

SIZE = (150, 210)
CUES = list(PAINTERS)


@pytest.fixture(scope='module')
def wholes():
    return {cue: Scene(3, seed=5, size=SIZE, cue=cue).read() for cue in CUES}


def blocks(picture, side):
    """Cut a picture into blocks: (rows, columns, side, side, ...)."""
    rows, cols = picture.shape[0] // side, picture.shape[1] // side
    picture = picture[: rows * side, : cols * side]
    shape = (rows, side, cols, side, *picture.shape[2:])
    return picture.reshape(shape).swapaxes(1, 2)


@pytest.mark.parametrize('cue', CUES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_window_equals_the_crop_of_the_whole(wholes, cue, data):
    row = data.draw(st.integers(0, SIZE[0] - 1), 'row')
    col = data.draw(st.integers(0, SIZE[1] - 1), 'col')
    height = data.draw(st.integers(1, SIZE[0] - row), 'height')
    width = data.draw(st.integers(1, SIZE[1] - col), 'width')
    scene = Scene(3, seed=5, size=SIZE, cue=cue)
    window = scene.read(row, col, height, width)
    for part, whole in zip(window, wholes[cue], strict=True):
        crop = whole[row : row + height, col : col + width]
        assert part.dtype == np.uint8
        np.testing.assert_array_equal(part, crop)


@pytest.mark.parametrize('cue', CUES)
def test_a_scene_grows_without_changing(wholes, cue):
    grown = Scene(3, seed=5, size=(65536, 65536), cue=cue)
    # Narrow scenes wrap their legend, which is all that may differ.
    below = 16
    window = grown.read(below, 0, SIZE[0] - below, SIZE[1])
    for part, whole in zip(window, wholes[cue], strict=True):
        np.testing.assert_array_equal(part, whole[below:])


@pytest.mark.parametrize('cue', CUES)
@pytest.mark.parametrize('pixels', [100, 1000])
def test_drawing_in_strips_leaves_no_trace(wholes, cue, pixels, monkeypatch):
    monkeypatch.setattr(drawing, '_STRIP', pixels)
    strips = Scene(3, seed=5, size=SIZE, cue=cue).read()
    for part, whole in zip(strips, wholes[cue], strict=True):
        np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize('cue', CUES)
def test_a_window_of_a_gigapixel_costs_what_a_window_costs(cue):
    scene = Scene(0, size=(65536, 65536), cue=cue)
    tracemalloc.start()
    try:
        rgb, label = scene.read(65536 - 1024, 65536 - 512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rgb.shape == (1024, 512, 3) and label.shape == (1024, 512)
    assert len(np.unique(rgb.reshape(-1, 3), axis=0)) > 100
    assert peak < rgb.nbytes + label.nbytes + 15e6


@pytest.mark.parametrize(
    ('cue', 'checksum'),
    [(None, 3567063887), ('scene', 2126024182), ('legend', 3312882011)],
)
def test_scenes_are_the_same_everywhere(cue, checksum):
    rgb, label = Scene(7, seed=11, size=(96, 160), cue=cue).read()
    assert zlib.crc32(rgb.tobytes() + label.tobytes()) == checksum


@pytest.mark.parametrize('cue', CUES)
def test_index_and_seed_give_other_scenes(cue):
    scene = Scene(0, seed=0, cue=cue)
    for other in replace(scene, index=1), replace(scene, seed=1):
        same = (scene.read()[1] == other.read()[1]).mean()
        assert same < 0.6


def test_only_the_panel_shows_the_season():
    swap = np.arange(256)
    swap[[land_cover.WINTER, land_cover.SUMMER]] = (
        land_cover.SUMMER,
        land_cover.WINTER,
    )
    for index in range(5):
        scene = Scene(index, cue='scene', cue_repeats=3)
        panel = np.zeros(scene.size, bool)
        panel[:24, :24] = True
        rgb, label = scene.read()
        other_rgb, other_label = replace(scene, redraw=1).read()
        np.testing.assert_array_equal(rgb[~panel], other_rgb[~panel])
        np.testing.assert_array_equal(other_label, swap[label])
        np.testing.assert_array_equal(label == 255, panel)
        # Inside the frame the two seasons are far apart, everywhere.
        inner = np.abs(np.subtract(rgb, other_rgb, dtype=int))[1:23, 1:23]
        assert inner.max(-1).min() > 60


def test_without_a_cue_labels_are_those_of_one_season():
    scene = Scene(2, cue=None)
    rgb, label = scene.read()
    assert label.max() < 8
    agree = []
    for redraw in (0, 1):
        cued = replace(scene, cue='scene', redraw=redraw).read()
        np.testing.assert_array_equal(rgb[32:], cued[0][32:])
        agree.append(np.array_equal(label[32:], cued[1][32:]))
    assert sorted(agree) == [False, True]


def test_half_of_the_land_hangs_on_the_season():
    scenes = [Scene(i, redraw=redraw) for i in range(40) for redraw in (0, 1)]
    labels = np.stack([scene.read()[1] for scene in scenes])
    shares = np.bincount(labels.ravel(), minlength=256)[:8] / labels.size
    assert shares.min() > 0.02
    assert 0.4 < shares[[land_cover.WINTER, land_cover.SUMMER]].sum() < 0.6
    # Over both seasons the crops are equally common, so that without the
    # season neither can be guessed.
    np.testing.assert_allclose(
        shares[land_cover.WINTER], shares[land_cover.SUMMER], rtol=1e-12
    )


def test_both_seasons_are_equally_common():
    warm = [
        Scene(index).read(8, 8, 1, 1)[0][0, 0, 2] < 128 for index in range(100)
    ]
    assert 35 < sum(warm) < 65


def read_legend(scene, rgb):
    """Recognise textures and classes from the pixels of a scene alone.

    Returns:
        tuple: Per block of a patch, the texture and the nearest class colour;
        whether the block belongs to the legend.
    """
    patches = blocks(rgb.astype(float), scene.patch)[..., :8, :8, :]
    grey = patches.mean(-1)
    grey -= grey.mean((-1, -2), keepdims=True)
    texture = np.einsum('rcij,tij->rct', grey, legend.TEXTURES).argmax(-1)
    colour = patches.mean((2, 3))
    hue = colour / colour.sum(-1, keepdims=True)
    palette = np.array(legend.PALETTE, float)
    palette /= palette.sum(-1, keepdims=True)
    nearest = np.abs(hue[..., None, :] - palette).sum(-1).argmin(-1)
    return texture, nearest, np.abs(hue - 1 / 3).max(-1) > 0.05


@pytest.mark.parametrize('patch', [8, 16])
@pytest.mark.parametrize('repeats', [1, 2, 4])
def test_the_legend_alone_tells_all_labels(patch, repeats):
    for index in range(3):
        scene = Scene(
            index, cue='legend', patch=patch, cue_repeats=repeats, size=SIZE
        )
        rgb, label = scene.read()
        texture, colour, listed = read_legend(scene, rgb)
        assert listed.sum() == 8 * repeats
        meaning = np.full(8, 255)
        meaning[texture[listed]] = colour[listed]
        assert np.bincount(texture[listed]).tolist() == [repeats] * 8
        assert np.bincount(meaning).tolist() == [2, 2, 2, 2]
        expected = np.where(listed, 255, meaning[texture])
        drawn = blocks(label, patch)
        np.testing.assert_array_equal(
            drawn, np.broadcast_to(expected[..., None, None], drawn.shape)
        )
        assert label.max(where=label < 255, initial=0) <= 3


def test_only_the_legend_shows_its_deal():
    scene = Scene(0, cue='legend')
    rgb, label = scene.read()
    height, width = scene.cue_size
    assert (height, width) == (16, 128)
    for redraw in range(1, 4):
        other_rgb, other_label = replace(scene, redraw=redraw).read()
        np.testing.assert_array_equal(rgb[height:], other_rgb[height:])
        assert (rgb[:height] != other_rgb[:height]).mean() > 0.3
        assert (label[height:] == other_label[height:]).mean() < 0.7


def test_a_labelled_legend_names_its_entries():
    scene = Scene(3, cue='legend', label_cue=True)
    rgb, label = scene.read()
    plain_rgb, plain_label = replace(scene, label_cue=False).read()
    np.testing.assert_array_equal(rgb, plain_rgb)
    height, _ = scene.cue_size
    np.testing.assert_array_equal(label[height:], plain_label[height:])
    assert (plain_label[:height] == 255).all()
    _, colour, listed = read_legend(scene, rgb)
    np.testing.assert_array_equal(label[::8, ::8][listed], colour[listed])


def test_a_texture_alone_tells_nothing():
    counts = np.zeros((8, 4), int)
    for index in range(100):
        scene = Scene(index, cue='legend')
        rgb, label = scene.read(16, 0, 112, 128)
        texture, _, _ = read_legend(scene, rgb)
        np.add.at(counts, (texture, label[::8, ::8]), 1)
    best = counts.max(1).sum() / counts.sum()
    assert best < 0.35


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'cue': 'season'}, "cue='season' is unknown"),
        ({'size': (16, 64), 'cue_repeats': 2}, '16x16 pixels leaves nothing'),
        ({'size': (64, 64), 'cue': 'legend', 'patch': 16}, 'leaves nothing'),
        ({'label_cue': True}, "cue='scene' has no class"),
    ],
)
def test_a_scene_that_cannot_be_drawn_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Scene(0, **kwargs)


@pytest.mark.parametrize(
    'window', [(0, 0, 129, 1), (-1, 0, 2, 2), (0, 128), (5, 5, 0, 3)]
)
def test_a_window_beyond_the_scene_is_refused(window):
    with pytest.raises(ValueError, match='not within the scene of 128x128'):
        Scene(0).read(*window)
