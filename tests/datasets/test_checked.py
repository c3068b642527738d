# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import warnings
from typing import ClassVar

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmseg.registry import DATASETS
from PIL import Image
from torch.utils.data import DataLoader

from infsa_seg.datasets import CheckedSegDataset

CLASSES = ('ground', 'tree', 'house')
PIPELINE = [{'type': 'LoadImageFromFile'}, {'type': 'LoadAnnotations'}]


@pytest.fixture
def root(tmp_path):
    """Folders ``img`` and ``ann`` with three pairs; values 0, 1, 2 and 255."""
    for folder in 'img', 'ann':
        (tmp_path / folder).mkdir()
    for name in 'abc':
        image = np.full((4, 6, 3), 90, np.uint8)
        Image.fromarray(image).save(tmp_path / f'img/{name}.jpg')
        write_mask(tmp_path / f'ann/{name}.png', {0: 10, 1: 8, 2: 5, 255: 1})
    return tmp_path


def write_mask(path, counts, dtype=np.uint8):
    mask = np.repeat([*counts], [*counts.values()]).astype(dtype)
    Image.fromarray(mask.reshape(4, 6)).save(path)


def build(root, **kwargs):
    return DATASETS.build(
        {
            'type': 'CheckedSegDataset',
            'data_root': str(root),
            'data_prefix': {'img_path': 'img', 'seg_map_path': 'ann'},
            'metainfo': {'classes': CLASSES},
            'pipeline': PIPELINE,
            'serialize_data': False,
            **kwargs,
        }
    )


def test_good_folders_pass_without_a_word(root):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        dataset = build(root)
        masks = [item['gt_seg_map'] for item in dataset]
    assert len(dataset) == 3
    expected = np.repeat([0, 1, 2, 255], [10, 8, 5, 1]).reshape(4, 6)
    for mask in masks:
        np.testing.assert_array_equal(mask, expected)


def test_a_missing_folder(root):
    with pytest.raises(FileNotFoundError, match=r'no folder .*elsewhere/img'):
        build(root / 'elsewhere')


@pytest.mark.parametrize('folder', ['img', 'ann'])
def test_an_empty_folder(root, folder):
    for path in (root / folder).iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=f'no files in .*/{folder} '):
        build(root)


@pytest.mark.parametrize(
    ('option', 'found'),
    [('img_suffix', r"'\.jpg' \(3\)"), ('seg_map_suffix', r"'\.png' \(3\)")],
)
def test_a_wrong_suffix(root, option, found):
    message = rf"ends in '\.tif'; .*{found}; set {option}"
    with pytest.raises(FileNotFoundError, match=message):
        build(root, **{option: '.tif'})


def test_images_without_masks(root):
    for name in 'ab':
        (root / f'ann/{name}.png').unlink()
    message = r'no mask for .*img/a\.jpg, .*img/b\.jpg: looked in .*/ann'
    with pytest.raises(ValueError, match=message):
        build(root)


def test_many_names_are_counted(root):
    image = root / 'img/a.jpg'
    for number in range(9):
        (root / f'img/x{number}.jpg').write_bytes(image.read_bytes())
    with pytest.raises(ValueError, match=r'x2\.jpg and 6 more'):
        build(root)


def test_masks_without_images(root):
    (root / 'img/b.jpg').unlink()
    with pytest.warns(UserWarning, match=r'no image for .*ann/b\.png: these'):
        dataset = build(root)
    assert len(dataset) == 2


def test_unlabelled_images_need_no_masks(root):
    dataset = build(root, data_prefix={'img_path': 'img'}, pipeline=[])
    assert len(dataset) == 3
    assert 'seg_map_path' not in dataset[0]


def test_a_list_of_names_picks_a_part(root):
    (root / 'part.txt').write_text('a\nc\n')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(build(root, ann_file='part.txt')) == 2
    (root / 'part.txt').write_text('a\nlost\n')
    with pytest.raises(
        FileNotFoundError, match=r'part\.txt lists .*lost\.jpg'
    ):
        build(root, ann_file='part.txt')
    with pytest.raises(FileNotFoundError, match=r'gone\.txt does not exist'):
        build(root, ann_file='gone.txt')


def test_values_beyond_the_classes_in_the_first_mask(root):
    write_mask(root / 'ann/a.png', {0: 20, 3: 3, 7: 1})
    message = (
        r'ann/a\.png has values .*: 3 \(3 pixels\), 7 \(1 pixels\)\. '
        r'Classes are 0 to 2, 255 is ignored.* label_values=\{3: 255\}'
    )
    with pytest.raises(ValueError, match=message):
        build(root)


@pytest.mark.parametrize(
    ('value', 'dtype'), [(3, np.uint8), (256, np.uint16), (65535, np.uint16)]
)
def test_values_beyond_the_classes_in_a_later_mask(root, value, dtype):
    # Upstream casts to uint8: 256 would be class 0, and 65535 ignored.
    write_mask(root / 'ann/c.png', {0: 20, value: 4}, dtype)
    dataset = build(root)
    assert dataset[1]['gt_seg_map'].max() == 255
    with pytest.raises(ValueError, match=rf'c\.png .*: {value} \(4 pixels\)'):
        dataset[2]


def test_workers_name_the_mask_too(root):
    write_mask(root / 'ann/c.png', {0: 20, 3: 4})
    loader = DataLoader(build(root), num_workers=1, collate_fn=pseudo_collate)
    with pytest.raises(ValueError, match=r'c\.png has values'):
        list(loader)


def test_each_mask_is_checked_once(root, monkeypatch):
    dataset = build(root)
    check, checked = dataset._check_mask, []
    monkeypatch.setattr(
        dataset, '_check_mask', lambda p: (checked.append(p), check(p))
    )
    for index in 0, 1, 2, 0, 1, 2:
        dataset[index]
    # The first was checked when the dataset was built.
    assert checked == [str(root / 'ann/b.png'), str(root / 'ann/c.png')]


def test_masks_of_0_and_255_are_warned_of_once(root):
    for name in 'abc':
        write_mask(root / f'ann/{name}.png', {0: 20, 255: 4})
    two = {'metainfo': {'classes': CLASSES[:2]}}
    with pytest.warns(UserWarning, match='255 is ignored') as caught:
        dataset = build(root, **two)
        assert list(np.unique(dataset[1]['gt_seg_map'])) == [0, 255]
    assert len(caught) == 1
    assert 'set label_values={255: 1}' in str(caught[0].message)

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        dataset = build(root, label_values={255: 1}, **two)
        assert list(np.unique(dataset[1]['gt_seg_map'])) == [0, 1]
        # Among three classes this is ground beside ignored pixels.
        assert list(np.unique(build(root)[1]['gt_seg_map'])) == [0, 255]


def test_palette_pngs_are_read_as_indices(root):
    for name in 'abc':
        mask = Image.fromarray(
            np.repeat([0, 1, 2], 8).astype(np.uint8).reshape(4, 6)
        )
        mask.putpalette([200, 10, 10, 30, 200, 40, 5, 5, 250])
        mask.save(root / f'ann/{name}.png')
        assert Image.open(root / f'ann/{name}.png').mode == 'P'
    mask = build(root)[0]['gt_seg_map']
    np.testing.assert_array_equal(mask.ravel(), np.repeat([0, 1, 2], 8))


def test_coloured_masks(root):
    coloured = Image.fromarray(np.zeros((4, 6, 3), np.uint8))
    coloured.save(root / 'ann/a.png')
    with pytest.raises(ValueError, match=r'a\.png is a picture with 3 chan'):
        build(root)


def test_jpeg_masks(root):
    for name in 'abc':
        mask = Image.open(root / f'ann/{name}.png')
        mask.save(root / f'ann/{name}.jpg')
    with pytest.raises(ValueError, match='JPEG does not keep class indices'):
        build(root, seg_map_suffix='.jpg')


def test_unreadable_masks(root):
    path = root / 'ann/b.png'
    path.write_bytes(path.read_bytes()[:60])
    dataset = build(root)
    with pytest.raises(ValueError, match=r'mask .*b\.png is unreadable'):
        dataset[1]


def test_picked_classes_follow_the_values_of_the_masks(root):
    @DATASETS.register_module(force=True)
    class Town(CheckedSegDataset):
        METAINFO: ClassVar = {
            'classes': CLASSES,
            'palette': [[9, 9, i] for i in '123'],
        }

    write_mask(root / 'ann/a.png', {0: 8, 1: 6, 2: 5, 9: 5})
    dataset = build(
        root,
        type='Town',
        metainfo={'classes': ('house', 'ground')},
        label_values={9: 2},
    )
    # Ground 0 -> 1, tree 1 -> ignored, house 2 and 9 -> 0.
    mask = dataset[0]['gt_seg_map'].ravel()
    expected = np.repeat([1, 255, 0], [8, 6, 10])
    np.testing.assert_array_equal(mask, expected)


def test_zero_can_stand_for_no_label(root):
    for name in 'abc':
        write_mask(root / f'ann/{name}.png', {0: 9, 1: 9, 3: 6})
    with pytest.raises(ValueError, match=r'3 \(6 pixels\)'):
        build(root)
    mask = build(root, reduce_zero_label=True)[0]['gt_seg_map']
    np.testing.assert_array_equal(
        mask.ravel(), np.repeat([255, 0, 2], [9, 9, 6])
    )
    with pytest.raises(ValueError, match='cannot be combined'):
        build(root, reduce_zero_label=True, label_values={0: 255})


def test_classes_must_be_known(root):
    with pytest.raises(ValueError, match='does not know its classes; give'):
        build(root, metainfo=None)


def test_a_lazy_dataset_checks_on_first_use(root):
    dataset = build(root / 'elsewhere', lazy_init=True)
    with pytest.raises(FileNotFoundError, match='no folder'):
        dataset.full_init()


def test_label_values_survive_a_config_file(root, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text('data = dict(label_values={1: 255, 2: 1})')
    child = tmp_path / 'child.py'
    child.write_text("_base_ = 'config.py'\ndata = dict(lazy_init=False)")
    cfg = Config.fromfile(child)
    (tmp_path / 'dumped.py').write_text(cfg.pretty_text)
    dumped = Config.fromfile(tmp_path / 'dumped.py').data
    mask = build(root, **dumped)[0]['gt_seg_map']
    np.testing.assert_array_equal(
        mask.ravel(), np.repeat([0, 255, 1, 255], [10, 8, 5, 1])
    )
