# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmseg.registry import DATASETS
from PIL import Image

from infsa_seg.datasets import BrokenPictureError, ImageNet

LOAD = [dict(type='LoadPicture'), dict(type='PackClsInputs')]


def picture(path, value=100, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, (value, 0, 255)).save(path)


@pytest.fixture
def root(tmp_path):
    """Three classes, in no order, the last with two folders in train."""
    for split, count in ('train', 3), ('val', 1):
        for index, name in enumerate(('n03', 'n01', 'n02')):
            for number in range(count):
                path = tmp_path / split / name / f'{name}_{number}.JPEG'
                picture(path, 10 * index)
    picture(tmp_path / 'train/n02/images/deep.jpg')
    (tmp_path / 'train/n01/notes.txt').write_text('no picture')
    (tmp_path / 'train/.cache').mkdir()
    return tmp_path


def build(root, split='train', **kwargs):
    return ImageNet(
        data_root=str(root),
        data_prefix=dict(img_path=split),
        pipeline=LOAD,
        **kwargs,
    )


def labels(dataset):
    items = [dataset.get_data_info(i) for i in range(len(dataset))]
    root = dataset.data_root
    return {
        item['img_path'].removeprefix(f'{root}/'): item['gt_label']
        for item in items
    }


def test_layout_of_folders(root):
    train, val = build(root), build(root, 'val')
    assert isinstance(train, BaseDataset)
    assert train.metainfo['classes'] == ('n01', 'n02', 'n03')
    assert val.metainfo == train.metainfo
    found = labels(train)
    assert len(found) == 10
    assert found['train/n02/images/deep.jpg'] == 1
    assert all(
        label == int(re.search(r'n0(\d)', path)[1]) - 1
        for path, label in found.items()
    )
    assert labels(val) == {f'val/n0{k}/n0{k}_0.JPEG': k - 1 for k in (1, 2, 3)}
    assert train.get_cat_ids(0) == [0]
    item = train[0]
    assert item['inputs'].shape == (3, 4, 6)
    assert item['data_samples'].gt_label == 0
    assert item['data_samples'].img_path.endswith('n01_0.JPEG')
    # Blue comes first.
    blue, _, red = item['inputs'].float().mean((1, 2))
    assert blue > 200 > red


def test_a_split_may_lack_classes_that_train_has(root):
    picture(root / 'train/n00/a.JPEG')
    assert set(labels(build(root, 'val')).values()) == {1, 2, 3}


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('index', 'b.JPEG 2\na.JPEG 0\n\n'),
        ('name', 'b.JPEG n03\na.JPEG n01\n'),
        ('tiny', 'b.JPEG\tn03\t0\t0\t62\t63\na.JPEG\tn01\t1\t2\t3\t4\n'),
    ],
)
def test_list_of_a_split(root, name, text):
    for other in 'ab':
        picture(root / f'flat/{other}.JPEG')
    (root / f'{name}.txt').write_text(text)
    dataset = build(root, 'flat', ann_file=f'{name}.txt')
    assert labels(dataset) == {'flat/b.JPEG': 2, 'flat/a.JPEG': 0}
    assert dataset.metainfo['classes'] == ('n01', 'n02', 'n03')


def test_imagenet_v2_has_indices_for_names(root, tmp_path):
    folder = tmp_path / 'v2'
    for name in ('0', '2', '10', '11'):
        picture(folder / name / 'a.jpeg')
    dataset = ImageNet(
        data_root=str(folder), data_prefix=dict(img_path=''), pipeline=LOAD
    )
    assert sorted(labels(dataset).values()) == [0, 2, 10, 11]
    assert dataset.metainfo['classes'] == tuple(map(str, range(12)))
    # With the names of the classes at hand, they are kept.
    dataset = ImageNet(
        data_root=str(folder),
        data_prefix=dict(img_path=''),
        metainfo=dict(classes=[f'n{k:02}' for k in range(12)]),
    )
    assert sorted(labels(dataset).values()) == [0, 2, 10, 11]
    assert dataset.metainfo['classes'][11] == 'n11'


def test_names_that_are_numbers_are_sorted_as_numbers(tmp_path):
    for name in ('9', '10', '8'):
        picture(tmp_path / 'train' / name / 'a.png')
    found = labels(build(tmp_path))
    assert found == {
        'train/8/a.png': 0,
        'train/9/a.png': 1,
        'train/10/a.png': 2,
    }


def test_classes_of_a_file(root):
    (root / 'classes.txt').write_text('n03 third\nn02 second\nn01 first\n')
    dataset = build(
        root, 'val', metainfo=dict(classes=str(root / 'classes.txt'))
    )
    assert labels(dataset)['val/n03/n03_0.JPEG'] == 0
    # Names of folders may have blanks themselves.
    (root / 'val/n03').rename(root / 'val/hot dog')
    names = ('n01', 'n02', 'hot dog')
    dataset = build(root, 'val', metainfo=dict(classes=names))
    assert labels(dataset)['val/hot dog/n03_0.JPEG'] == 2
    assert dataset.metainfo['classes'] == names


class TestMistakes:
    def fails(self, error, message, *args, **kwargs):
        with pytest.raises(error, match=message) as caught:
            build(*args, **kwargs)
        assert '\n' not in str(caught.value)

    def test_no_folder(self, root):
        self.fails(
            FileNotFoundError, r'nowhere: no such folder', root, 'nowhere'
        )

    def test_no_classes(self, root):
        (root / 'empty').mkdir()
        self.fails(FileNotFoundError, 'empty: has no folders', root, 'empty')

    def test_a_class_without_pictures(self, root):
        (root / 'train/n04').mkdir()
        self.fails(FileNotFoundError, r'train/n04: no picture', root)

    def test_a_class_that_train_lacks(self, root):
        picture(root / 'val/n09/a.JPEG')
        self.fails(ValueError, r"val/n09: 'n09' is none of the 3", root, 'val')

    def test_an_index_that_is_too_large(self, root):
        picture(root / 'val/3/a.JPEG')
        self.fails(ValueError, r"val/3: '3' is none of the 3", root, 'val')

    def test_no_train_beside_it(self, tmp_path):
        picture(tmp_path / 'val/n01/a.JPEG')
        self.fails(
            FileNotFoundError,
            r'train: no such folder to name the classes; set class_folder',
            tmp_path,
            'val',
        )
        dataset = build(tmp_path, 'val', class_folder='val')
        assert len(dataset) == 1

    @pytest.mark.parametrize(
        ('text', 'error', 'message'),
        [
            ('a.JPEG n09', ValueError, "line 2: 'n09' is none of the 3"),
            ('a.JPEG 3', ValueError, "line 2: '3' is none"),
            ('a.JPEG', ValueError, "line 2: 'a.JPEG' is not a picture and"),
            ('c.JPEG 0', FileNotFoundError, 'line 2: .*c.JPEG does not exist'),
        ],
    )
    def test_in_a_list(self, root, text, error, message):
        picture(root / 'flat/a.JPEG')
        (root / 'val.txt').write_text(f'a.JPEG 0\n{text}\n')
        self.fails(
            error, rf'val\.txt, {message}', root, 'flat', ann_file='val.txt'
        )

    def test_no_list(self, root):
        self.fails(
            FileNotFoundError, r'v\.txt: no such file', root, ann_file='v.txt'
        )

    def test_no_file_of_classes(self, root):
        self.fails(
            FileNotFoundError,
            r'c\.txt: no such file of classes',
            root,
            metainfo=dict(classes='c.txt'),
        )


def cut_off(path):
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3))
    Image.fromarray(noise.astype(np.uint8)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def no_picture(path):
    path.write_text('this is text')


def empty(path):
    path.write_bytes(b'')


BREAK = pytest.mark.parametrize('spoil', [cut_off, no_picture, empty])


class TestBrokenPictures:
    @BREAK
    def test_is_an_error_that_names_the_file(self, root, spoil):
        path = root / 'train/n01/n01_1.JPEG'
        spoil(path)
        dataset = build(root)
        with pytest.raises(BrokenPictureError) as caught:
            dataset[1]
        message = str(caught.value)
        assert message.startswith(f'{path}: is no picture, or a damaged one')
        assert caught.value.path == str(path)
        assert '\n' not in message and '<' not in message
        assert dataset[0]['data_samples'].gt_label == 0

    def test_arrives_from_a_worker_as_it_was(self, root):
        no_picture(root / 'train/n01/n01_1.JPEG')
        loader = torch.utils.data.DataLoader(
            build(root), num_workers=1, collate_fn=list
        )
        with pytest.raises(ValueError, match=r'n01_1\.JPEG: is no picture'):
            list(loader)

    @BREAK
    def test_may_be_passed_over_in_training(self, root, spoil):
        path = root / 'train/n01/n01_1.JPEG'
        spoil(path)
        broken = root / 'lists/broken.txt'
        dataset = build(root, broken_list=str(broken))
        assert len(dataset) == 10
        for _ in range(3):
            other = dataset[1]['data_samples'].img_path
            assert other != str(path)
        assert broken.read_text() == f'{path}\n'
        # The next run knows it.
        again = build(root, broken_list=str(broken))
        assert len(again) == 9
        assert str(path) not in labels(again)

    def test_so_many_and_no_more(self, root):
        for index in range(3):
            no_picture(root / f'train/n01/n01_{index}.JPEG')
        broken = root / 'broken.txt'
        dataset = build(root, broken_list=str(broken), max_broken=2)
        # What comes in place of one may be another.
        with pytest.raises(ValueError, match=r'broken\.txt: lists 3 broken'):
            for index in range(3):
                dataset[index]
        assert len(set(broken.read_text().split())) == 3

    def test_is_an_error_in_testing_unless_listed(self, root):
        path = root / 'val/n01/n01_0.JPEG'
        no_picture(path)
        broken = root / 'broken.txt'
        dataset = build(root, 'val', broken_list=str(broken), test_mode=True)
        with pytest.raises(BrokenPictureError, match=r'n01_0\.JPEG'):
            dataset[0]
        assert not broken.exists()
        broken.write_text(f'{path}\n')
        dataset = build(root, 'val', broken_list=str(broken), test_mode=True)
        assert len(dataset) == 2


def test_from_the_registry(root):
    dataset = DATASETS.build(dict(type='ImageNet', data_root=str(root)))
    assert len(dataset) == 10
