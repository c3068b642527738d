# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import json
import signal

import numpy as np
import pytest
import rasterio
from mmengine.registry import DefaultScope
from mmseg.registry import DATASETS
from PIL import Image

from infsa_seg.apis.converters import Colours

from .rasters import CRS, TRANSFORM, listing, read, write_tiff

pytestmark = pytest.mark.filterwarnings(
    'ignore::rasterio.errors.NotGeoreferencedWarning'
)

INRIA, LOVEDA, DEEPGLOBE, POTSDAM = (
    f'dataset_converters/{name}.py'
    for name in ('inria', 'loveda', 'deepglobe', 'potsdam')
)


def write_picture(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def load(out, split, classes, suffix='.tif'):
    """The pair of a split, as training would read it."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(
            {
                'type': 'LargeRasters',
                'data_root': str(out),
                'data_prefix': {
                    'img_path': f'img_dir/{split}',
                    'seg_map_path': f'ann_dir/{split}',
                },
                'img_suffix': suffix,
                'metainfo': {'classes': classes},
                'mode': 'grid',
                'pipeline': [{'type': 'LoadWindow'}],
            }
        )


@pytest.fixture
def inria(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / 'AerialImageDataset'
    for name in 'austin1', 'austin6', 'tyrol-w5', 'tyrol-w36':
        image = rng.integers(0, 255, (300, 40, 3), np.uint8)
        write_tiff(root / f'train/images/{name}.tif', image)
        mask = rng.choice(np.array([0, 255], np.uint8), (300, 40))
        # Those of the authors have no coordinates of their own.
        write_tiff(root / f'train/gt/{name}.tif', mask, located=False)
    write_tiff(root / 'test/images/bellingham1.tif', image)
    return root


class TestInria:
    @pytest.mark.parametrize('above', [False, True])
    def test_converts(self, tool, inria, tmp_path, above):
        out = tmp_path / 'out'
        root = inria.parent if above else inria
        outcome = tool(INRIA, root, '--out-dir', out)
        assert outcome.status == 0, outcome.err
        assert outcome.err == ''
        assert f'{out}: 2 images for train' in outcome.out
        assert listing(out) == [
            'ann_dir/train/austin6.tif',
            'ann_dir/train/tyrol-w36.tif',
            'ann_dir/val/austin1.tif',
            'ann_dir/val/tyrol-w5.tif',
            'img_dir/test/bellingham1.tif',
            'img_dir/train/austin6.tif',
            'img_dir/train/tyrol-w36.tif',
            'img_dir/val/austin1.tif',
            'img_dir/val/tyrol-w5.tif',
        ]
        indices, file = read(out / 'ann_dir/val/tyrol-w5.tif')
        with rasterio.open(inria / 'train/gt/tyrol-w5.tif') as source:
            np.testing.assert_array_equal(indices, source.read(1) // 255)
        assert file['transform'] == TRANSFORM
        assert file['crs'] == rasterio.crs.CRS.from_string(CRS)
        assert json.loads(file['CLASS_NAMES'])[1] == 'building'
        image = out / 'img_dir/train/austin6.tif'
        assert image.resolve() == inria / 'train/images/austin6.tif'

    def test_training_reads_it(self, tool, inria, tmp_path):
        out = tmp_path / 'out'
        assert tool(INRIA, inria, '-o', out, '--copy').status == 0
        assert not (out / 'img_dir/val/austin1.tif').is_symlink()
        dataset = load(out, 'val', ('background', 'building'))
        item = dataset[0]
        with rasterio.open(inria / 'train/images/austin1.tif') as source:
            rgb = source.read().transpose(1, 2, 0)
        with rasterio.open(inria / 'train/gt/austin1.tif') as source:
            mask = source.read(1)
        np.testing.assert_array_equal(item['img'][..., ::-1], rgb)
        np.testing.assert_array_equal(item['gt_seg_map'], mask // 255)

    def test_nothing_is_replaced_unasked(self, tool, inria, tmp_path):
        out = tmp_path / 'out'
        assert tool(INRIA, inria, '-o', out).status == 0
        mask = out / 'ann_dir/train/austin6.tif'
        mask.write_bytes(b'mine')
        outcome = tool(INRIA, inria, '-o', out)
        assert outcome.status == 1
        assert 'exists; use --overwrite' in outcome.err
        assert mask.read_bytes() == b'mine'
        assert tool(INRIA, inria, '-o', out, '--overwrite').status == 0
        assert read(mask)[0].max() == 1

    def test_a_wrong_mask_leaves_nothing_behind(self, tool, inria, tmp_path):
        bad = np.zeros((300, 40), np.uint8)
        bad[299, 0] = 7
        write_tiff(inria / 'train/gt/austin6.tif', bad)
        out = tmp_path / 'out'
        outcome = tool(INRIA, inria, '-o', out)
        assert outcome.status == 1
        (line,) = outcome.err.splitlines()
        assert line == (
            f'inria.py: error: {inria}/train/gt/austin6.tif: has the value 7, '
            'not only [0, 255]; is it a mask of this data set?'
        )
        assert not [name for name in listing(out) if 'austin6' in name]

    def test_an_interrupt_leaves_nothing_half_done(
        self, tool, inria, tmp_path, monkeypatch
    ):
        translate = 'infsa_seg.apis.converters.Values.translate'

        def interrupt(*args):
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(translate, interrupt)
        out = tmp_path / 'out'
        assert tool(INRIA, inria, '-o', out).status == 130
        assert listing(out) == []

    @pytest.mark.parametrize(
        ('what', 'message'),
        [
            ('size', r'gt/austin1.tif: has 300x41 pixels, its image '),
            ('mask', r'images/austin1.tif: there is no mask '),
            ('name', r'images/austin.tif: is not called CITY and a number'),
            ('colour', r'gt/austin1.tif: has 3 channels of uint8, not 1'),
            ('folder', r'has no folder train; give the folder'),
            ('empty', r'no images were found'),
        ],
    )
    def test_errors_are_one_line(self, tool, inria, tmp_path, what, message):
        gt, images = inria / 'train/gt', inria / 'train/images'
        if what == 'size':
            write_tiff(gt / 'austin1.tif', np.zeros((300, 41), np.uint8))
        elif what == 'mask':
            (gt / 'austin1.tif').unlink()
        elif what == 'name':
            (images / 'austin1.tif').rename(images / 'austin.tif')
        elif what == 'colour':
            write_tiff(gt / 'austin1.tif', np.zeros((300, 40, 3), np.uint8))
        elif what == 'folder':
            inria = gt
        elif what == 'empty':
            for image in inria.rglob('images/*.tif'):
                image.unlink()
        outcome = tool(INRIA, inria, '-o', tmp_path / 'out')
        assert outcome.status == 1
        (line,) = outcome.err.splitlines()
        assert message in line


class TestLoveDA:
    @pytest.fixture
    def root(self, tmp_path):
        values = np.arange(40 * 30).reshape(40, 30) % 8
        root = tmp_path / 'loveda'
        number = 0
        for split in 'Train', 'Val', 'Test':
            for area in 'Rural', 'Urban':
                folder = root / split / area
                image = np.full((40, 30, 3), number, np.uint8)
                write_picture(folder / f'images_png/{number}.png', image)
                if split != 'Test':
                    write_picture(
                        folder / f'masks_png/{number}.png',
                        ((values + number) % 8).astype(np.uint8),
                    )
                number += 1
        return root

    def test_converts(self, tool, root, tmp_path):
        out = tmp_path / 'out'
        outcome = tool(LOVEDA, root, '-o', out)
        assert outcome.status == 0, outcome.err
        assert listing(out / 'ann_dir') == [
            'train/0.tif',
            'train/1.tif',
            'val/2.tif',
            'val/3.tif',
        ]
        assert listing(out / 'img_dir/test') == ['4.png', '5.png']
        values = (np.arange(40 * 30).reshape(40, 30) + 3) % 8
        indices, _ = read(out / 'ann_dir/val/3.tif')
        np.testing.assert_array_equal(
            indices, np.where(values == 0, 255, values - 1)
        )
        dataset = load(out, 'val', tuple('abcdefg'), '.png')
        np.testing.assert_array_equal(dataset[1]['gt_seg_map'], indices)

    def test_equal_names_in_town_and_country(self, tool, root, tmp_path):
        for kind in 'images_png', 'masks_png':
            folder = root / 'Train/Urban' / kind
            (folder / '1.png').rename(folder / '0.png')
        outcome = tool(LOVEDA, root, '-o', tmp_path / 'out')
        assert outcome.status == 1
        (line,) = outcome.err.splitlines()
        assert 'Train/Urban/images_png/0.png: ' in line
        assert 'Train/Rural/images_png/0.png has the same name' in line

    def test_without_validation_data(self, tool, root, tmp_path):
        (root / 'Val').rename(tmp_path / 'elsewhere')
        outcome = tool(LOVEDA, root, '-o', tmp_path / 'out')
        assert outcome.status == 1
        assert 'has no folder Val or val; give the folder' in outcome.err


class TestDeepGlobe:
    COLOURS = np.array(
        [
            *((0, 255, 255), (255, 255, 0), (255, 0, 255), (0, 255, 0)),
            *((0, 0, 255), (255, 255, 255), (0, 0, 0)),
        ],
        np.uint8,
    )

    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / 'deepglobe'
        rng = np.random.default_rng(0)
        for number in range(2, 25):
            indices = rng.integers(0, 7, (20, 30))
            # Of colours that are not pure.
            noise = rng.integers(0, 100, (20, 30, 3), np.uint8)
            mask = np.where(
                self.COLOURS[indices] == 255, 255 - noise, noise
            ).astype(np.uint8)
            folder = root / 'land-train'
            write_picture(folder / f'{number}_mask.png', mask)
            write_picture(folder / f'{number}_sat.jpg', mask)
            np.save(root / f'{number}.npy', indices)
        return root

    def test_converts(self, tool, root, tmp_path):
        out = tmp_path / 'out'
        outcome = tool(DEEPGLOBE, root, '-o', out)
        assert outcome.status == 0 and outcome.err == ''
        # The tenth and the twentieth of 2, 3, ..., 24.
        assert listing(out / 'ann_dir/val') == ['11.tif', '21.tif']
        assert listing(out / 'img_dir/val') == ['11.jpg', '21.jpg']
        assert len(listing(out / 'ann_dir/train')) == 21
        for name in 'val/11', 'train/2':
            truth = np.load(root / f'{name.partition("/")[2]}.npy')
            np.testing.assert_array_equal(
                read(out / f'ann_dir/{name}.tif')[0],
                np.where(truth == 6, 255, truth),
            )

    def test_a_list_says_what_validates(self, tool, root, tmp_path):
        (tmp_path / 'val.txt').write_text('3\n24\n')
        arguments = ('-o', tmp_path / 'out', '--val-list')
        folder = root / 'land-train'
        outcome = tool(DEEPGLOBE, folder, *arguments, tmp_path / 'val.txt')
        assert outcome.status == 0, outcome.err
        names = listing(tmp_path / 'out/ann_dir/val')
        assert names == ['24.tif', '3.tif']
        (tmp_path / 'val.txt').write_text('99')
        outcome = tool(DEEPGLOBE, folder, *arguments, tmp_path / 'val.txt')
        assert outcome.status == 1
        assert 'val.txt: lists 99, but there is no' in outcome.err


class TestPotsdam:
    COLOURS = TestDeepGlobe.COLOURS[[5, 4, 0, 3, 1]].tolist()
    COLOURS = np.array([*COLOURS, (255, 0, 0), (0, 0, 0)], np.uint8)

    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / 'potsdam'
        rng = np.random.default_rng(0)
        for tile in '2_10', '2_13':
            image = rng.integers(0, 255, (50, 60, 4), np.uint8)
            name = f'top_potsdam_{tile}'
            write_tiff(root / f'2_Ortho_RGB/{name}_RGB.tif', image[..., :3])
            write_tiff(root / f'4_Ortho_RGBIR/{name}_RGBIR.tif', image)
            indices = np.arange(50 * 60).reshape(50, 60) % 6
            label = self.COLOURS[indices]
            write_tiff(root / f'5_Labels_all/{name}_label.tif', label)
            label[10] = 0
            write_tiff(
                root / f'5_Labels_noB/{name}_label_noBoundary.tif', label
            )
        return root

    def test_converts(self, tool, root, tmp_path):
        out = tmp_path / 'out'
        outcome = tool(POTSDAM, root, '-o', out)
        assert outcome.status == 0 and outcome.err == ''
        assert listing(out) == [
            'ann_dir/train/top_potsdam_2_10.tif',
            'ann_dir/val/top_potsdam_2_13.tif',
            'img_dir/train/top_potsdam_2_10.tif',
            'img_dir/val/top_potsdam_2_13.tif',
        ]
        indices, file = read(out / 'ann_dir/val/top_potsdam_2_13.tif')
        np.testing.assert_array_equal(
            indices, np.arange(50 * 60).reshape(50, 60) % 6
        )
        assert file['transform'] == TRANSFORM
        with rasterio.open(out / 'ann_dir/val/top_potsdam_2_13.tif') as file:
            assert file.colormap(1)[4] == (255, 255, 0, 255)

    def test_without_boundaries_and_with_infrared(self, tool, root, tmp_path):
        out = tmp_path / 'out'
        options = ('--channels', 'RGBIR', '--no-boundary')
        assert tool(POTSDAM, root, '-o', out, *options).status == 0
        indices, _ = read(out / 'ann_dir/train/top_potsdam_2_10.tif')
        assert (indices[10] == 255).all()
        assert (np.delete(indices, 10, 0) < 6).all()
        dataset = load(out, 'train', tuple('abcdef'))
        assert dataset[0]['img'].shape == (50, 60, 4)

    def test_other_colours_are_counted_and_ignored(self, tool, root, tmp_path):
        path = root / '5_Labels_all/top_potsdam_2_13_label.tif'
        label = self.COLOURS[np.arange(50 * 60).reshape(50, 60) % 6]
        label[4, :3] = 252, 255, 0
        write_tiff(path, label)
        out = tmp_path / 'out'
        outcome = tool(POTSDAM, root, '-o', out)
        assert outcome.status == 0
        assert outcome.err == (
            f'potsdam.py: warning: {path}: 3 pixels have colours of no '
            'class, and are ignored\n'
        )
        indices, _ = read(out / 'ann_dir/val/top_potsdam_2_13.tif')
        assert (indices == 255).sum() == 3

    def test_a_picture_in_place_of_a_mask(self, tool, root, tmp_path):
        path = root / '5_Labels_all/top_potsdam_2_13_label.tif'
        write_tiff(path, np.full((50, 60, 3), 9, np.uint8))
        out = tmp_path / 'out'
        outcome = tool(POTSDAM, root, '-o', out)
        assert outcome.status == 1
        assert 'has no colour of this data set; is it a mask?' in outcome.err
        assert not (out / 'ann_dir/val/top_potsdam_2_13.tif').exists()

    def test_nothing_to_convert(self, tool, root, tmp_path):
        options = ('-o', tmp_path / 'out', '--channels', 'IRRG')
        outcome = tool(POTSDAM, root, *options)
        assert outcome.status == 1
        assert 'has no top_potsdam_*_IRRG.tif; unpack them' in outcome.err
        (root / '5_Labels_all/top_potsdam_2_10_label.tif').unlink()
        outcome = tool(POTSDAM, root, '-o', tmp_path / 'out')
        assert 'there is no mask' in outcome.err and outcome.status == 1


def test_colours_are_read_at_a_threshold():
    pixels = np.array([[[250, 130, 3], [127, 0, 90]]], np.uint8)
    labels = Colours([(255, 255, 0)], threshold=128)
    indices, unknown = labels.translate(pixels, 'a.png')
    assert indices.tolist() == [[0, 255]] and unknown == 0
    exact = Colours([(255, 255, 0)]).translate(pixels, 'a.png')
    assert exact[0].tolist() == [[255, 255]] and exact[1] == 2
