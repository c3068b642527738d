# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pickle

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.structures import PixelData
from mmseg.evaluation import IoUMetric
from mmseg.models import SegDataPreProcessor
from mmseg.registry import DATASETS, TRANSFORMS
from mmseg.visualization import SegLocalVisualizer
from torch.utils.data import DataLoader

from infsa_seg.datasets import LoadSyntheticScene, Scene, SyntheticScenes
from tests.apis.conftest import REPO

PIPELINE = [{'type': 'LoadSyntheticScene'}, {'type': 'PackSegInputs'}]
CONFIGS = ['synthetic_scenes', 'synthetic_scenes_legend']


def build(**kwargs):
    kwargs = {'num_scenes': 4, 'size': 64, 'cue_repeats': 2} | kwargs
    kwargs = {'serialize_data': False} | kwargs
    return DATASETS.build(
        {'type': 'SyntheticScenes', 'pipeline': PIPELINE, **kwargs}
    )


def rgb_of(sample):
    return sample['inputs'].flip(0).permute(1, 2, 0).numpy()


@pytest.mark.parametrize('cue', [None, 'scene', 'legend'])
def test_samples_are_packed_as_upstream_packs_files(cue):
    dataset = build(cue=cue, size=(64, 96), seed=3)
    assert len(dataset) == 4
    for index in range(4):
        rgb, label = Scene(index, 3, (64, 96), cue, cue_repeats=2).read()
        item = dataset[index]
        sample = item['data_samples']
        np.testing.assert_array_equal(rgb_of(item), rgb)
        np.testing.assert_array_equal(sample.gt_sem_seg.data[0], label)
        assert sample.ori_shape == sample.img_shape == (64, 96)
        assert sample.img_path == f'{cue or "plain"}-3-0000{index}.png'
        assert sample.reduce_zero_label is False


@pytest.mark.parametrize(('cue', 'classes'), [('scene', 8), ('legend', 4)])
def test_classes_and_palette_follow_the_cue(cue, classes):
    metainfo = build(cue=cue).metainfo
    assert len(metainfo['classes']) == len(set(metainfo['classes'])) == classes
    assert np.shape(metainfo['palette']) == (classes, 3)
    assert metainfo['label_map'] is None


def test_workers_draw_the_same_scenes():
    dataset = build(num_scenes=6)
    loader = DataLoader(
        pickle.loads(pickle.dumps(dataset)),
        batch_size=2,
        num_workers=2,
        collate_fn=pseudo_collate,
    )
    inputs = [image for batch in loader for image in batch['inputs']]
    assert len(inputs) == 6
    for index, image in enumerate(inputs):
        assert torch.equal(image, dataset[index]['inputs'])


def test_the_preprocessor_gives_rgb_in_training_batches():
    dataset = build(size=(48, 64))
    preprocessor = SegDataPreProcessor(
        mean=[0.0] * 3, std=[1.0] * 3, bgr_to_rgb=True, size=(64, 64)
    )
    batch = pseudo_collate([dataset[0], dataset[1]])
    data = preprocessor(batch, training=True)
    assert data['inputs'].shape == (2, 3, 64, 64)
    rgb, label = Scene(1, size=(48, 64), cue_repeats=2).read()
    np.testing.assert_array_equal(
        data['inputs'][1, :, :48], rgb.transpose(2, 0, 1)
    )
    padded = data['data_samples'][1].gt_sem_seg.data[0]
    np.testing.assert_array_equal(padded[:48], label)
    assert (padded[48:] == 255).all()


def measure(dataset, predict):
    metric = IoUMetric(iou_metrics=['mIoU'])
    metric.dataset_meta = dataset.metainfo
    for item in dataset:
        sample = item['data_samples']
        truth = sample.gt_sem_seg.data
        sample.pred_sem_seg = PixelData(data=predict(truth))
        metric.process({}, [sample.to_dict()])
    return metric.evaluate(len(dataset))


def test_the_metric_leaves_the_cue_out():
    dataset = build(cue='legend', num_scenes=8, size=128)
    perfect = measure(dataset, lambda truth: truth.where(truth < 255, 0))
    assert perfect['mIoU'] == 100.0
    constant = measure(dataset, torch.zeros_like)
    assert constant['mIoU'] < 15


def test_predictions_can_be_drawn(tmp_path):
    dataset = build(cue='legend')
    item = dataset[0]
    visualizer = SegLocalVisualizer()
    visualizer.dataset_meta = dataset.metainfo
    visualizer.add_datasample(
        'scene',
        rgb_of(item),
        item['data_samples'],
        draw_pred=False,
        out_file=str(tmp_path / 'scene.png'),
        with_labels=False,
    )
    assert (tmp_path / 'scene.png').exists()


def test_windows_of_a_huge_scene_lie_within_it():
    scene = Scene(0, size=(65536, 300))
    load = TRANSFORMS.build(
        {'type': 'LoadSyntheticScene', 'crop_size': (32, 299)}
    )
    np.random.seed(0)
    windows = [load._draw_window(scene) for _ in range(200)]
    rows, cols, heights, widths = zip(*windows, strict=True)
    assert max(rows) > 60000 and min(rows) < 5000
    assert set(cols) == {0, 1}
    assert set(heights) == {32} and set(widths) == {299}

    np.random.seed(0)
    results = load({'scene': scene, 'seg_fields': []})
    rgb, label = scene.read(*windows[0])
    np.testing.assert_array_equal(results['img'], rgb[..., ::-1])
    np.testing.assert_array_equal(results['gt_seg_map'], label)
    assert results['img_shape'] == results['ori_shape'] == (32, 299)
    assert results['seg_fields'] == ['gt_seg_map']


def test_a_window_larger_than_the_scene_is_refused():
    load = LoadSyntheticScene(crop_size=(65, 64))
    results = {'scene': Scene(0, size=(64, 64)), 'seg_fields': []}
    with pytest.raises(ValueError, match=r'crop_size=\(65, 64\) is larger'):
        load(results)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'num_scenes': 0}, 'num_scenes=0: give 1 or more'),
        ({'cue': 'moon'}, "cue='moon' is unknown"),
        ({'size': 8}, 'leaves nothing of a scene of 8x8'),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SyntheticScenes(**{'num_scenes': 1, **kwargs})


@pytest.mark.parametrize('name', CONFIGS)
def test_configs_build_and_their_splits_share_no_scene(name):
    cfg = Config.fromfile(REPO / f'configs/_base_/datasets/{name}.py')
    labels = []
    for split in ('train', 'val', 'test'):
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        item = dataset[0]
        assert item['inputs'].shape == (3, 128, 128)
        labels.append(item['data_samples'].gt_sem_seg.data)
    assert not torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[1], labels[2])
    augmented = TRANSFORMS.build(cfg.tta_pipeline[1])(
        TRANSFORMS.build(cfg.tta_pipeline[0])(dataset.get_data_info(0))
    )
    first, second = augmented['inputs']
    assert torch.equal(first, item['inputs'])
    assert torch.equal(second, first.flip(2))
