# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pickle
import re
from collections import Counter

import numpy as np
import pytest
import rasterio
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.runner import Runner
from mmseg.models import SegDataPreProcessor
from mmseg.registry import DATASETS
from PIL import Image
from torch.utils.data import DataLoader

from infsa_seg.apis.large import RasterImage
from infsa_seg.datasets.transforms import LabelTable, OpenRasters
from infsa_seg.datasets.windows import find_classes
from infsa_seg.ops import Rows
from infsa_seg.raster import Window, open_raster
from tests.apis.conftest import REPO

CLASSES = ('ground', 'tree', 'house')
PIPELINE = [{'type': 'LoadWindow'}]
SIZES = {'a': (96, 130), 'b': (40, 50)}


def write(path, pixels, **profile):
    """Write (H, W) or (H, W, C) as a tiled GeoTIFF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = np.moveaxis(pixels.reshape(*pixels.shape[:2], -1), 2, 0)
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        count=len(planes),
        height=planes.shape[1],
        width=planes.shape[2],
        dtype=planes.dtype,
        tiled=True,
        blockxsize=32,
        blockysize=16,
        transform=rasterio.Affine(1, 0, 100, 0, -1, 200),
        **profile,
    ) as file:
        file.write(planes)


@pytest.fixture
def arrays():
    """Images and masks by name; labels 0 to 2 and 255."""
    rng = np.random.default_rng(1)
    return {
        name: (
            rng.integers(1, 255, (*size, 3), np.uint8),
            rng.choice(np.array([0, 1, 2, 255], np.uint8), size),
        )
        for name, size in SIZES.items()
    }


@pytest.fixture
def root(tmp_path, arrays):
    for name, (image, mask) in arrays.items():
        write(tmp_path / f'img/{name}.tif', image)
        write(tmp_path / f'ann/{name}.tif', mask)
    return tmp_path


def build(root, **kwargs):
    return DATASETS.build(
        {
            'type': 'LargeRasters',
            'data_root': str(root),
            'data_prefix': {'img_path': 'img', 'seg_map_path': 'ann'},
            'metainfo': {'classes': CLASSES},
            'window': (24, 32),
            'pipeline': PIPELINE,
            **kwargs,
        }
    )


def name_of(item):
    return item['img_path'].rpartition('/')[2].partition('.')[0]


@pytest.mark.parametrize('mode', ['random', 'balanced', 'grid'])
def test_windows_are_slices_of_the_whole(root, arrays, mode):
    dataset = build(root, mode=mode)
    assert len(dataset) == 4 * 5 + 2 * 2
    for item in dataset:
        image, mask = arrays[name_of(item)]
        window = item['window']
        assert window[2:] == (24, 32)
        np.testing.assert_array_equal(
            item['img'], image[window.slices][..., ::-1]
        )
        np.testing.assert_array_equal(item['gt_seg_map'], mask[window.slices])
        assert item['img'].flags.c_contiguous
        assert item['gt_seg_map'].dtype == np.uint8
        assert item['img_shape'] == item['ori_shape'] == (24, 32)
        assert item['seg_fields'] == ['gt_seg_map']
        assert item['seg_map_path'].endswith(f'ann/{name_of(item)}.tif')
        assert item['reduce_zero_label'] is False


@pytest.mark.parametrize('stride', [None, 17, (24, 5)])
def test_a_grid_covers_every_pixel(root, stride):
    dataset = build(root, mode='grid', stride=stride)
    seen = {name: np.zeros(size, int) for name, size in SIZES.items()}
    for index in range(len(dataset)):
        item = dataset.get_data_info(index)
        (window,) = item['windows']
        seen[name_of(item)][window.slices] += 1
    assert all(count.min() == 1 for count in seen.values())
    # Nothing twice but where the last ones were moved inside.
    if stride is None:
        assert (seen['a'][:72, :96] == 1).all()
        assert len(dataset) == 4 * 5 + 2 * 2


def test_random_windows_follow_area_and_reach_the_borders(root):
    dataset = build(root, length=2000)
    infos = [dataset.get_data_info(index) for index in range(2000)]
    names = Counter(name_of(info) for info in infos)
    share = 96 * 130 / (96 * 130 + 40 * 50)
    assert abs(names['a'] / 2000 - share) < 0.03
    corners = [
        info['windows'][0][:2] for info in infos if name_of(info) == 'a'
    ]
    rows, cols = np.array(corners).T
    assert set(rows) == set(range(96 - 24 + 1))
    assert set(cols) == set(range(130 - 32 + 1))
    # Evenly: no row is preferred beyond chance.
    assert max(Counter(rows.tolist()).values()) < 2.2 * len(rows) / 73


def test_windows_are_a_function_of_seed_epoch_and_index(root):
    def windows(dataset):
        return [
            (name_of(info), *info['windows'])
            for info in map(dataset.get_data_info, range(20))
        ]

    dataset = build(root, length=20)
    first = windows(dataset)
    np.random.seed(5)
    assert windows(dataset) == windows(build(root, length=99)) == first
    assert windows(build(root, length=20, seed=1)) != first
    dataset.set_epoch(3)
    assert dataset.epoch == 3
    other = windows(dataset)
    assert other != first
    dataset.set_epoch(0)
    assert windows(dataset) == first


def batches(loader):
    return [
        (item['img'], item['gt_seg_map'], item['window'])
        for batch in loader
        for item in batch
    ]


def test_workers_read_the_same_windows(root):
    dataset = build(root, mode='balanced', length=12)
    first = dataset[0]
    assert len(dataset.pipeline.transforms[0].rasters) == 2
    alone = batches(DataLoader(dataset, 3, collate_fn=list))
    loader = DataLoader(
        dataset, 3, num_workers=2, collate_fn=list, persistent_workers=True
    )
    for epoch in 0, 1:
        dataset.set_epoch(epoch)
        together = batches(loader)
        expected = [dataset[index] for index in range(12)]
        for mine, (image, labels, window) in zip(
            expected, together, strict=True
        ):
            np.testing.assert_array_equal(image, mine['img'])
            np.testing.assert_array_equal(labels, mine['gt_seg_map'])
            assert window == mine['window']
    windows = [window for _, _, window in alone]
    assert [window for _, _, window in together] != windows
    assert windows[0] == first['window']


def test_a_dataset_can_be_pickled_with_open_files(root):
    dataset = build(root)
    dataset.set_epoch(2)
    item = dataset[3]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy.pipeline.transforms[0].rasters) == 0
    np.testing.assert_array_equal(copy[3]['img'], item['img'])


def test_rare_classes_come_up(tmp_path):
    """One pixel in a thousand is a house, in one corner of one raster."""
    masks = [np.zeros((300, 400), np.uint8) for _ in range(2)]
    masks[0][:, 200:] = 1
    masks[1][280:, 390:] = 2
    masks[1][:4, :] = 255
    for name, mask in zip('ab', masks, strict=True):
        write(tmp_path / f'img/{name}.tif', mask)
        write(tmp_path / f'ann/{name}.tif', mask)
    shares = {}
    for mode in 'random', 'balanced':
        dataset = build(tmp_path, mode=mode, length=120, window=32)
        found = Counter()
        for item in dataset:
            found.update(np.unique(item['gt_seg_map']).tolist())
        shares[mode] = found[2] / 120
    assert shares['random'] < 0.05
    assert 0.25 < shares['balanced'] < 0.45
    # Near a border the window is moved inside, and holds the pixel still.
    centred = [
        item['window']
        for item in dataset
        if 2 in item['gt_seg_map'] and name_of(item) == 'b'
    ]
    assert len(centred) == found[2]
    assert max(w.row for w in centred) == 300 - 32


class TestFindClasses:
    TABLE = LabelTable({0: 0, 1: 1, 2: 2, 255: 255}, 3, 255)

    def test_counts_and_places(self, root, arrays):
        mask = arrays['a'][1]
        path = str(root / 'ann/a.tif')
        with open_raster(path, indexed=True) as reader:
            found = find_classes(reader, self.TABLE, path, 0)
        assert set(found) == {0, 1, 2}
        for index, pixels in found.items():
            assert pixels.total == (mask == index).sum()
            rows, cols = pixels.places.T
            assert (mask[rows, cols] == index).all()
            assert len(pixels.places) == 1024
            assert len(set(map(tuple, pixels.places.tolist()))) == 1024

    def test_large_masks_are_thinned_out(self, root, arrays, monkeypatch):
        monkeypatch.setattr('infsa_seg.datasets.windows._INDEXED_PIXELS', 999)
        monkeypatch.setattr('infsa_seg.datasets.windows._STRIP_PIXELS', 2000)
        mask = arrays['a'][1]
        path = str(root / 'ann/a.tif')
        with open_raster(path, indexed=True) as reader:
            found = find_classes(reader, self.TABLE, path, 0)
        for index, pixels in found.items():
            # 96 * 130 / 999 is between 3 and 4 squared.
            seen = mask[::4, ::4] == index
            assert pixels.total == 16 * seen.sum()
            places = sorted(map(tuple, pixels.places.tolist()))
            expected = (4 * np.argwhere(seen)).tolist()
            assert places == sorted(map(tuple, expected))


def test_small_rasters_are_given_whole_and_padded_in_training(root, arrays):
    dataset = build(
        root,
        window=64,
        mode='grid',
        pipeline=[*PIPELINE, {'type': 'PackSegInputs'}],
    )
    assert len(dataset) == 2 * 3 + 1
    item = dataset[6]
    assert item['inputs'].shape == (3, 40, 50)
    assert item['data_samples'].ori_shape == (40, 50)
    preprocessor = SegDataPreProcessor(
        mean=[0.0] * 3, std=[1.0] * 3, bgr_to_rgb=True, size=(64, 64)
    )
    batch = pseudo_collate([dataset[0], item])
    data = preprocessor(batch, training=True)
    image, mask = arrays['b']
    np.testing.assert_array_equal(
        data['inputs'][1, :, :40, :50], image.transpose(2, 0, 1)
    )
    labels = data['data_samples'][1].gt_sem_seg.data[0]
    np.testing.assert_array_equal(labels[:40, :50], mask)
    assert (labels[40:] == 255).all() and (labels[:, 50:] == 255).all()


class TestValidity:
    def test_nodata_is_zero_and_ignored(self, root, arrays):
        image, mask = (array.copy() for array in arrays['a'])
        image[:30, :40] = 7
        write(root / 'img/a.tif', image, nodata=7)
        dataset = build(root, mode='grid', window=200)
        item = dataset[0]
        assert (item['img'][:30, :40] == 0).all()
        assert (item['gt_seg_map'][:30, :40] == 255).all()
        np.testing.assert_array_equal(item['gt_seg_map'][30:], mask[30:])
        np.testing.assert_array_equal(item['img'][30:], image[30:, :, ::-1])

    def test_nodata_of_the_config_wins(self, root, arrays):
        image = np.where(arrays['b'][1][..., None] == 1, 9, arrays['b'][0])
        write(root / 'img/b.tif', image.astype(np.uint8), nodata=0)
        dataset = build(root, mode='grid', window=200, nodata=9)
        labels = dataset[1]['gt_seg_map']
        assert (labels[arrays['b'][1] == 1] == 255).all()
        assert (labels != 1).all() and (labels == 2).any()

    def test_alpha(self, root, arrays):
        image, mask = arrays['a']
        alpha = np.full((96, 130), 255, np.uint8)
        alpha[50:] = 0
        write(
            root / 'img/a.tif',
            np.dstack([image, alpha]),
            photometric='RGB',
            alpha='yes',
        )
        item = build(root, mode='grid', window=200)[0]
        assert item['img'].shape == (96, 130, 3)
        assert (item['img'][50:] == 0).all()
        assert (item['gt_seg_map'][50:] == 255).all()
        np.testing.assert_array_equal(item['gt_seg_map'][:50], mask[:50])

    def test_nan_in_numbers_that_become_float32(self, root, arrays):
        for name, (image, _) in arrays.items():
            values = image.astype(np.float64) / 7
            values[3, 4, 1] = np.nan
            write(root / f'img/{name}.tif', values)
        item = build(root, mode='grid', window=200)[0]
        assert item['img'].dtype == np.float32
        assert (item['img'][3, 4] == 0).all()
        assert item['gt_seg_map'][3, 4] == 255
        assert np.isfinite(item['img']).all()
        np.testing.assert_array_equal(
            item['img'][5:],
            (arrays['a'][0][5:, :, ::-1] / 7).astype(np.float32),
        )

    def test_mostly_empty_windows_are_drawn_again(self, root, arrays):
        image = arrays['a'][0].copy()
        image[:, :90] = 0
        (root / 'img/b.tif').unlink()
        (root / 'ann/b.tif').unlink()
        write(root / 'img/a.tif', image, nodata=0)
        shares = {}
        for min_valid in 0, 0.5, 1:
            dataset = build(root, min_valid=min_valid, length=40)
            shares[min_valid] = np.array(
                [(item['img'] != 0).all(2).mean() for item in dataset]
            )
        assert (shares[0] < 0.5).mean() > 0.5
        assert (shares[0.5] < 0.5).mean() < 0.15
        # What is not to be had is not drawn for ever.
        assert shares[1].mean() > shares[0.5].mean()

    def test_what_a_mask_does_not_know_is_ignored(self, root, arrays):
        """By nodata that is no class, and by a mask beside the mask."""
        mask = arrays['a'][1].copy()
        mask[mask == 255] = 9
        write(root / 'ann/a.tif', mask, nodata=9)
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
            write(root / 'ann/b.tif', arrays['b'][1])
            with rasterio.open(root / 'ann/b.tif', 'r+') as file:
                file.write_mask(arrays['b'][0][..., 0] > 99)
        dataset = build(root, mode='grid', window=200)
        np.testing.assert_array_equal(dataset[0]['gt_seg_map'], arrays['a'][1])
        np.testing.assert_array_equal(
            dataset[1]['gt_seg_map'],
            np.where(arrays['b'][0][..., 0] > 99, arrays['b'][1], 255),
        )

    def test_nodata_that_is_a_class_is_that_class(self, root, arrays):
        write(root / 'ann/a.tif', arrays['a'][1], nodata=0)
        item = build(root, mode='grid', window=200)[0]
        np.testing.assert_array_equal(item['gt_seg_map'], arrays['a'][1])


def test_channels_in_the_order_of_the_model(root, arrays):
    item = build(root, mode='grid', window=200, channels=(3, 1))[0]
    np.testing.assert_array_equal(item['img'], arrays['a'][0][..., [2, 0]])
    item = build(root, mode='grid', window=200, channels=(2, 1, 3))[0]
    np.testing.assert_array_equal(item['img'], arrays['a'][0][..., [2, 0, 1]])


def test_the_model_sees_what_inference_shows_it(root, arrays):
    """Both normalise the same numbers, in the same order."""

    class Model:
        def __init__(self):
            self.data_preprocessor = SegDataPreProcessor(
                mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], bgr_to_rgb=True
            )
            self.backbone = self.patch_embed = self.projection = self
            self.in_channels = 3

    model = Model()
    pipeline = [*PIPELINE, {'type': 'PackSegInputs'}]
    for channels in None, (2, 3, 1), (1, 1, 1):
        item = build(
            root, mode='grid', window=200, pipeline=pipeline, channels=channels
        )[1]
        trained = model.data_preprocessor(pseudo_collate([item]))['inputs']
        with open_raster(root / 'img/b.tif') as reader:
            shown = RasterImage(reader, model, Window(0, 0, 40, 50), channels)
            whole = shown.read(Rows(0, 40), Rows(0, 50))
            assert torch.equal(whole, trained)


def test_zero_can_stand_for_nothing(root, arrays):
    for name, (_, mask) in arrays.items():
        shifted = np.where(mask == 255, 0, mask + 1).astype(np.uint8)
        write(root / f'ann/{name}.tif', shifted)
    dataset = build(root, mode='grid', window=200, reduce_zero_label=True)
    np.testing.assert_array_equal(dataset[0]['gt_seg_map'], arrays['a'][1])


def test_values_and_an_ignored_index_of_ones_own(root, arrays):
    for name, (_, mask) in arrays.items():
        values = mask.astype(np.int32)
        values[mask == 2], values[mask == 255] = -5, 7000
        write(root / f'ann/{name}.tif', values)
    dataset = build(
        root,
        mode='grid',
        window=200,
        ignore_index=-100,
        label_values={-5: 2, 7000: -100},
    )
    labels = dataset[0]['gt_seg_map']
    mask = arrays['a'][1]
    np.testing.assert_array_equal(
        labels, np.where(mask == 255, -100, mask.astype(int))
    )


def test_a_list_names_the_rasters(root):
    (root / 'part.txt').write_text('b\n')
    dataset = build(root, ann_file='part.txt', mode='grid')
    assert {name_of(item) for item in dataset} == {'b'}


def test_pictures_without_masks(root, arrays):
    for name, (image, _) in arrays.items():
        Image.fromarray(image).save(root / f'img/{name}.png')
    dataset = build(
        root, data_prefix={'img_path': 'img'}, img_suffix='.png', mode='grid'
    )
    item = dataset[0]
    np.testing.assert_array_equal(item['img'], arrays['a'][0][:24, :32, ::-1])
    assert 'gt_seg_map' not in item


class TestErrors:
    @pytest.mark.parametrize(
        ('kwargs', 'message'),
        [
            ({'mode': 'all'}, "mode='all' is unknown; use 'random'"),
            ({'window': 0}, 'window=0: give a positive number'),
            ({'window': (1, 2, 3)}, r'window=\(1, 2, 3\): give'),
            ({'length': 0}, 'length=0: give 1 or more'),
            ({'stride': 8}, "stride is for mode 'grid'"),
            ({'mode': 'grid', 'length': 3}, 'length and min_valid are for'),
            ({'mode': 'grid', 'min_valid': 0.1}, 'length and min_valid'),
            ({'mode': 'grid', 'stride': 25}, 'leaves gaps between windows'),
            ({'min_valid': 2}, 'min_valid=2: give a share'),
            ({'seed': -1}, 'seed=-1: give 0 or more'),
            ({'channels': (0, 1)}, 'give numbers from 1 on'),
            ({'channels': (1, 4)}, r'a\.tif: has channels 1 to 3, not \[1, 4'),
        ],
    )
    def test_arguments(self, root, kwargs, message):
        with pytest.raises(ValueError, match=message):
            build(root, **kwargs)

    def test_a_mask_of_another_size(self, root):
        write(root / 'ann/b.tif', np.zeros((40, 51), np.uint8))
        message = r'ann/b\.tif: has 40x51 pixels, its image .*b\.tif 40x50; '
        with pytest.raises(ValueError, match=message):
            build(root)

    def test_a_missing_mask(self, root):
        (root / 'ann/b.tif').unlink()
        with pytest.raises(ValueError, match=r'no mask for .*img/b\.tif: '):
            build(root)

    def test_a_coloured_mask(self, root, arrays):
        write(root / 'ann/b.tif', arrays['b'][0])
        with pytest.raises(ValueError, match=r'b\.tif: is a picture with 3'):
            build(root)

    def test_a_mask_of_fractions(self, root):
        write(root / 'ann/b.tif', np.zeros((40, 50), np.float32))
        with pytest.raises(ValueError, match=r'b\.tif: has values of type fl'):
            build(root)

    def test_images_of_different_channels(self, root, arrays):
        write(root / 'img/b.tif', arrays['b'][0][..., :2])
        message = r'b\.tif: has 2 channels, .*a\.tif has 3; choose'
        with pytest.raises(ValueError, match=message):
            build(root)
        assert build(root, channels=(1, 2))[0]['img'].shape[2] == 2

    @pytest.mark.parametrize('mode', ['grid', 'balanced'])
    def test_values_of_no_class(self, root, arrays, mode):
        mask = arrays['b'][1].copy()
        mask[:3, 0] = 7
        write(root / 'ann/b.tif', mask)
        message = (
            r'ann/b\.tif: has values that are no class: 7 \(3 pixels\)\. '
            r'Classes are 0 to 2, 255 is ignored; .*label_values=\{7: 255\}'
        )
        with pytest.raises(ValueError, match=message):
            build(root, mode=mode, window=200)[1]
        dataset = build(root, label_values={7: 255}, mode=mode, window=200)
        assert dataset[1]['gt_seg_map'].max() == 255

    def test_nothing_to_balance(self, root):
        with pytest.raises(ValueError, match="'balanced' needs masks"):
            build(root, data_prefix={'img_path': 'img'}, mode='balanced')
        for name, size in SIZES.items():
            write(root / f'ann/{name}.tif', np.full(size, 255, np.uint8))
        with pytest.raises(ValueError, match='no mask has a pixel that coun'):
            build(root, mode='balanced')

    def test_an_index_that_is_not_there(self, root):
        dataset = build(root, length=3)
        assert dataset[-1]['window'] == dataset[2]['window']
        with pytest.raises(IndexError):
            dataset[3]


def test_few_files_are_open_at_once(tmp_path):
    for name in 'abc':
        write(tmp_path / f'{name}.tif', np.zeros((8, 8), np.uint8))
    rasters = OpenRasters(max_open=2)
    first = rasters.get(str(tmp_path / 'a.tif'), nodata=None)
    rasters.get(str(tmp_path / 'b.tif'), nodata=None)
    assert rasters.get(str(tmp_path / 'a.tif'), nodata=None) is first
    rasters.get(str(tmp_path / 'c.tif'), nodata=None)
    assert len(rasters) == 2
    assert rasters.get(str(tmp_path / 'a.tif'), nodata=None) is first
    with pytest.raises(ValueError, match='max_open=0'):
        OpenRasters(0)


def test_files_that_hold_much_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr('infsa_seg.datasets.transforms._KEPT_NBYTES', 3000)
    rasters = OpenRasters()
    for name in 'abc':
        Image.new('L', (30, 40)).save(tmp_path / f'{name}.png')
        rasters.get(str(tmp_path / f'{name}.png'))
    assert len(rasters) == 2


def test_trains_as_the_guide_says(root, tmp_path, monkeypatch):
    """Two iterations and a validation with its config, made small."""
    (root / 'data').mkdir()
    (root / 'data/rasters').symlink_to(root)
    for split in 'train', 'val':
        for folder, kind in ('img_dir', 'img'), ('ann_dir', 'ann'):
            (root / folder).mkdir(exist_ok=True)
            (root / folder / split).symlink_to(root / kind)
    guide = (REPO / 'docs/large_rasters.md').read_text()
    (block,) = re.findall(r'```python\n(.*?)```', guide, re.DOTALL)
    (tmp_path / 'guide.py').write_text(
        block.replace('infsa_seg::', f'{REPO}/configs/')
    )
    (tmp_path / 'small.py').write_text("""
_base_ = './guide.py'
model = dict(
    data_preprocessor=dict(size=(32, 32)),
    backbone=dict(
        arch=dict(
            _delete_=True, embed_dims=16, num_layers=2, num_heads=2
        ),
        img_size=32,
        patch_size=8,
        out_indices=(0, 1),
    ),
    decode_head=dict(
        in_channels=[16, 16], in_index=[0, 1], channels=8, num_upsamples=1
    ),
)
workers = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(dataset=dict(window=32), batch_size=2, **workers)
val_dataloader = dict(dataset=dict(window=200), **workers)
test_dataloader = dict(dataset=dict(window=200), **workers)
train_cfg = dict(max_iters=2, val_interval=2)
work_dir = 'work'
""")
    monkeypatch.chdir(tmp_path)
    runner = Runner.from_cfg(Config.fromfile('small.py'))
    runner.train()
    assert runner.iter == 2
    assert (tmp_path / 'work/iter_2.pth').is_file()
    assert 0 <= runner.message_hub.get_scalar('val/mIoU').current() <= 100
