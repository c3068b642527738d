# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from mmengine.config import Config
from mmseg.registry import DATASETS
from PIL import Image

from infsa_seg.datasets import CamVidDataset
from tests.apis.conftest import REPO


@pytest.fixture
def cfg():
    return Config.fromfile(REPO / 'configs/_base_/datasets/camvid.py')


@pytest.fixture
def root(tmp_path):
    """CamVid with one picture of 360x480 in each split, labels 0 to 11."""
    mask = np.arange(360 * 480).reshape(360, 480) % 12
    for split in 'train', 'val', 'test':
        (tmp_path / f'img/{split}').mkdir(parents=True)
        (tmp_path / f'ann/{split}').mkdir(parents=True)
        image = Image.new('RGB', (480, 360), (90, 100, 110))
        image.save(tmp_path / f'img/{split}/a.jpg')
        Image.fromarray(mask.astype(np.uint8)).save(
            tmp_path / f'ann/{split}/a.png'
        )
    return tmp_path


def test_void_is_ignored(root):
    dataset = CamVidDataset(
        data_root=str(root),
        data_prefix={'img_path': 'img/val', 'seg_map_path': 'ann/val'},
        pipeline=[{'type': 'LoadAnnotations'}],
    )
    mask = dataset[0]['gt_seg_map']
    expected = np.arange(mask.size).reshape(mask.shape) % 12
    np.testing.assert_array_equal(
        mask, np.where(expected == 11, 255, expected)
    )
    assert len(dataset.metainfo['classes']) == 11
    assert dataset.metainfo['palette'][3] == [128, 64, 128]  # road


@pytest.mark.parametrize('split', ['train', 'val', 'test'])
def test_the_config_builds_on_any_root(cfg, root, split):
    loader = cfg[f'{split}_dataloader']
    assert loader.dataset.data_root == 'data/camvid'
    loader.dataset.data_root = str(root)
    item = DATASETS.build(loader.dataset)[0]
    label = item['data_samples'].gt_sem_seg.data
    assert item['inputs'].shape[1:] == label.shape[1:]
    assert {0, 10, 255} <= set(label.unique().tolist())
    if split != 'train':
        assert label.shape[1:] == (360, 480)


@pytest.mark.parametrize(
    ('split', 'length'), [('train', 367), ('val', 101), ('test', 233)]
)
def test_the_real_thing(cfg, shared, split, length):
    loader = cfg[f'{split}_dataloader']
    loader.dataset.data_root = str(shared / 'data/camvid')
    loader.dataset.pipeline = [{'type': 'LoadAnnotations'}]
    dataset = DATASETS.build(loader.dataset)
    assert len(dataset) == length
    masks = np.stack([dataset[i]['gt_seg_map'] for i in range(0, length, 10)])
    assert masks.shape[1:] == (360, 480)
    assert set(np.unique(masks)) == {*range(11), 255}
    # The order of the classes, as far as every street has it: the sky is
    # above the road, and both are larger than cyclists and poles.
    rows = np.arange(360)[None, :, None]
    sky, pole, road, cyclist = (masks == c for c in (0, 2, 3, 10))
    assert (rows * sky).sum() / sky.sum() < 120
    assert (rows * road).sum() / road.sum() > 240
    assert min(sky.sum(), road.sum()) > 3 * max(pole.sum(), cyclist.sum())
