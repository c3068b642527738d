# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.logging import MMLogger
from mmseg.models import EncoderDecoder
from PIL import Image

from infsa_seg.apis import infer_large_image, inference, init_model
from infsa_seg.apis.pictures import read_image
from tests.apis.conftest import REPO

TOOL = 'analysis/seams.py'


@pytest.fixture
def seams():
    """The tool as a module."""
    path = REPO / 'tools' / TOOL
    spec = importlib.util.spec_from_file_location('seams', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def weights(project, tmp_path):
    """A checkpoint of the project's model, as it starts."""
    path = tmp_path / 'weights.pth'
    torch.manual_seed(0)
    torch.save(init_model(project / 'tiny.py').state_dict(), path)
    # The tool would write to the output that is captured here.
    MMLogger._instance_dict.clear()
    return path


@pytest.fixture
def picture(tmp_path):
    """A picture of bright blotches, of odd size."""
    rng = np.random.default_rng(0)
    bright = rng.integers(0, 2, (9, 13)).repeat(8, 0).repeat(8, 1)[:67, :99]
    image = 60 + 120 * bright[..., None] + rng.integers(0, 40, (67, 99, 3))
    path = tmp_path / 'blotches.png'
    Image.fromarray(image.astype(np.uint8)).save(path)
    return path


def table(outcome):
    """Name and numbers of each row of what a tool printed."""
    assert outcome.status == 0, outcome.err
    lines = [x for x in outcome.out.splitlines() if x.startswith('|')]
    _, rule, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')] for line in lines
    )
    assert set(rule) == {'---'}
    return {
        name: [float(x.replace('-', 'nan')) for x in cells]
        for name, *cells in rows
    }


def count(classes, rows, cols):
    """Changes at borders and elsewhere, in percent, pair by pair."""
    pairs = {True: [], False: []}
    height, width = classes.shape
    for y in range(height):
        for x in range(width):
            if y:
                pairs[y in rows].append(classes[y, x] != classes[y - 1, x])
            if x:
                pairs[x in cols].append(classes[y, x] != classes[y, x - 1])
    return [100 * float(np.mean(pairs[at])) for at in (True, False)]


def shows(picture, part):
    """Whether ``part`` is somewhere in ``picture``."""
    height, width = part.shape[:2]
    corners = np.argwhere((picture == part[0, 0]).all(-1))
    return any(
        np.array_equal(picture[y, x : x + width], part[0])
        and np.array_equal(picture[y : y + height, x : x + width], part)
        for y, x in corners
    )


@pytest.mark.parametrize(
    ('size', 'tile', 'stride'),
    [(64, 16, 16), (67, 16, 16), (67, 32, 24), (65, 64, 64), (40, 16, 5)],
)
def test_borders_are_those_of_mmsegmentation(seams, size, tile, stride):
    """Where a pixel is covered by other tiles than the one before it."""
    pixels = torch.arange(size * size).view(1, 1, size, size)
    covering = [set() for _ in range(size)]

    def encode_decode(crop, metas):
        first = int(crop[0, 0, 0, 0]) % size
        assert crop.shape[2:] == (tile, tile)
        for col in range(first, first + tile):
            covering[col].add(first)
        return crop

    model = SimpleNamespace(
        test_cfg=SimpleNamespace(stride=(stride,) * 2, crop_size=(tile,) * 2),
        out_channels=1,
        encode_decode=encode_decode,
    )
    EncoderDecoder.slide_inference(model, pixels, [{}])
    tiling = seams.Tiling(tile, stride)
    assert tiling.starts(size) == sorted(set.union(*covering))
    assert tiling.borders(size) == [
        col for col in range(1, size) if covering[col] != covering[col - 1]
    ]


def test_ratio_of_a_seam(seams):
    """A step at the border, and one elsewhere, half as long.

    4 x 6 pixels: the border before column 3 has 4 pairs, which all differ; of
    the 16 + 18 others, two beside and one above the step's end do.
    """
    classes = torch.zeros(4, 6, dtype=torch.long)
    classes[:, 3:] = 1
    classes[2:, 5:] = 2
    at_border, elsewhere = seams.change_rates(classes, [], [3])
    assert at_border == 1
    assert elsewhere == pytest.approx((2 + 1) / (16 + 18))


def test_rates_by_hand(seams):
    """Both axes, several borders, and pixels that are not valid."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 3, (11, 14))
    rates = seams.change_rates(torch.from_numpy(classes), [4, 8], [4, 5, 9])
    expected = count(classes, [4, 8], [4, 5, 9])
    assert [100 * x for x in rates] == pytest.approx(expected)

    # A frame that is not valid changes nothing.
    framed = np.pad(classes, 1, constant_values=seams.UNKNOWN)
    assert rates == seams.change_rates(
        torch.from_numpy(framed), [5, 9], [5, 6, 10]
    )


def test_ratio_of_noise_is_one(seams):
    """Within 2 %: of half a million pairs, 7936 are at borders."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(4, (512, 512), generator=generator)
    borders = seams.Tiling(64, 64).borders(512)
    run = seams.Run(
        'noise',
        classes,
        (0.0, 0.0),
        seams.change_rates(classes, borders, borders),
        0.0,
    )
    assert run.seam_ratio == pytest.approx(1, abs=0.02)
    nothing = run._replace(rates=(0.0, 0.0))
    assert np.isnan(nothing.seam_ratio) and nothing.cells[3] == '-'


def test_against_tiles_cut_by_hand(tool, seams, project, weights, picture):
    """Each tile segmented by itself, the last ones cut so as to fit."""
    config = project / 'tiny.py'
    out = picture.parent / 'out'
    # Odd sides are padded: in tiles or not, pixels are not squeezed.
    kind = {'model.type': 'BandEncoderDecoder'}
    options = ['--cfg-options', 'model.type=BandEncoderDecoder']
    printed = table(
        tool(
            TOOL,
            *(config, weights, picture, '--tile', 32, '--out', out),
            *options,
        )
    )

    model = init_model(config, weights, cfg_options=kind)
    image = read_image(picture)
    logits, times = np.zeros((3, 67, 99)), np.zeros((67, 99))
    for top in (0, 32, 35):
        for left in (0, 32, 64, 67):
            rows, cols = slice(top, top + 32), slice(left, left + 32)
            tile = np.ascontiguousarray(image[rows, cols])
            logits[:, rows, cols] += inference(
                model, tile
            ).seg_logits.data.numpy()
            times[rows, cols] += 1
    tiles = (logits / times).argmax(0)
    whole = inference(model, image).pred_sem_seg.data[0].numpy()
    borders = [32, 35, 64], [32, 64, 67, 96]
    for name, classes in (('tiles', tiles), ('whole image', whole)):
        at_border, elsewhere = count(classes, *borders)
        assert elsewhere > 0
        expected = [at_border / elsewhere, at_border, elsewhere]
        # Two decimals are printed.
        assert printed[name][2:5] == pytest.approx(expected, abs=0.006)
        assert np.isnan(printed[name][:2]).all()

    (path,) = out.iterdir()  # no half of a file, nor the mask
    assert path.name == 'blotches_seams.png'
    shown = np.asarray(Image.open(path))
    # Both maps, five times as large, one beside the other.
    palette = np.array(model.dataset_meta['palette'], np.uint8)
    for classes in (tiles, whole):
        colours = palette[classes].repeat(5, 0).repeat(5, 1)
        assert shows(shown, colours)


def test_a_frame_that_is_not_valid(tool, project, weights, picture):
    """It changes nothing: tiles begin with the valid part."""
    image = np.asarray(Image.open(picture))
    framed = np.zeros((80, 110, 4), np.uint8)
    framed[5:72, 9:108] = np.dstack([image, np.full(image.shape[:2], 255)])
    path = picture.with_name('framed.png')
    Image.fromarray(framed).save(path)
    options = ['--tile', 32, '--out', picture.parent / 'out']
    options += ['--cfg-options', 'model.type=BandEncoderDecoder']
    tables = [
        table(tool(TOOL, project / 'tiny.py', weights, name, *options))
        for name in (picture, path)
    ]
    for name in ('tiles', 'whole image'):
        plain, other = (rows[name][2:5] for rows in tables)
        assert plain == other


def test_a_scene_is_measured(tool, project, weights, tmp_path):
    """Accuracies are those of infer_large; tiles that overlap have others."""
    config = tmp_path / 'scenes.py'
    config.write_text(f"""
_base_ = '{project / 'tiny.py'}'
model = dict(decode_head=dict(num_classes=8))
test_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='SyntheticScenes',
        num_scenes=2,
        size=(48, 64),
        patch=4,
        pipeline=[dict(type='LoadSyntheticScene'), dict(type='PackSegInputs')],
    )
)
""")
    model = init_model(config)
    torch.save(model.state_dict(), weights)
    areas = infer_large_image(model, 'scene:64x96', tmp_path / 'm').areas
    hits, union, _, labels = areas
    MMLogger._instance_dict.clear()

    arguments = [TOOL, config, weights, 'scene:64x96', '--tile', 32]
    arguments += ['--out', tmp_path]
    rows = table(tool(*arguments))
    miou, accuracy, *_ = rows['whole image']
    expected = (hits / union).nanmean(), hits.sum() / labels.sum()
    assert [miou, accuracy] == pytest.approx(
        [100 * x.item() for x in expected], abs=0.006
    )
    assert (tmp_path / 'scene-64x96-0_seams.png').exists()
    again = table(tool(*arguments, '--stride', 16))
    assert again['whole image'][:2] == [miou, accuracy]
    assert again['tiles'][0] != rows['tiles'][0]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('--tile 20', '--tile 20: is no multiple of the patch of 8 pixels'),
        ('--tile 72', '--tile 72: is larger than the image of 67x99 pixels'),
        ('--tile 32 --stride 40', '--stride 40: leaves gaps between tiles of'),
        ('none.png', 'none.png: No such file'),
        ('scene:x', 'scene:x: write scene:SIZE'),
        ('scene:64', 'scene:64: the config tests on BaseSegDataset'),
        (
            '--tile 32 --cfg-options model.backbone.attn_cfg.variant=softmax',
            'backbone.layers.0.attn.op (SoftmaxAttention) is neither local',
        ),
    ],
)
def test_a_bad_argument_is_one_line(
    tool, project, weights, picture, monkeypatch, arguments, message
):
    monkeypatch.chdir(picture.parent)
    values = arguments.split()
    if values[0].startswith('-'):
        values.insert(0, picture)
    config = project / 'tiny.py'
    outcome = tool(TOOL, config, weights, '--out', 'out', *values)
    assert outcome.status == 1
    assert 'Traceback' not in outcome.err
    assert not outcome.out.count('|')
    *_, line = outcome.err.splitlines()
    assert line.startswith(f'seams.py: error: {message}')
    assert not (picture.parent / 'out').exists()


def test_one_tile_has_no_border(seams):
    with pytest.raises(ValueError, match='covers the whole image'):
        seams.Tiling(32, 32).check(32, 32, 8)
    seams.Tiling(32, 32).check(32, 33, 8)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('scene:64', 'arguments are required: --out'),
        ('scene:64 --out o --tile 0', "--tile: '0' is no positive integer"),
        ('scene:64 --out o --device x', "--device: 'x' is not there"),
    ],
)
def test_bad_usage(tool, arguments, message):
    outcome = tool(TOOL, 'tiny.py', 'weights.pth', *arguments.split())
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]
