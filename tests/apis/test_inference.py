# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import cv2
import numpy as np
import pytest
import torch
from mmseg.evaluation import IoUMetric

from infsa_seg.apis import inference, init_model
from infsa_seg.apis.infer import measure_areas


@pytest.fixture(scope='module')
def model(project, trained):
    return init_model(project / 'tiny.py', trained / 'iter_30.pth')


def test_model_is_ready(model):
    assert not model.training
    assert model.dataset_meta['classes'] == ('dark', 'bright', 'unseen')
    assert model.dataset_meta['palette'][1] == [255, 255, 0]


def test_files_and_arrays_agree_in_any_order(model, project):
    paths = sorted((project / 'data' / 'image').iterdir())
    arrays = [cv2.imread(str(path)) for path in paths]
    from_arrays = inference(model, arrays)
    from_files = inference(model, paths)
    assert len(from_files) == len(paths)
    for one, other in zip(from_arrays, from_files, strict=True):
        assert one.pred_sem_seg.data.shape == (1, 32, 48)
        assert torch.equal(one.pred_sem_seg.data, other.pred_sem_seg.data)


def test_single_image(model):
    sample = inference(model, np.full((40, 24, 3), 200, np.uint8))
    assert sample.pred_sem_seg.data.shape == (1, 40, 24)
    assert (sample.pred_sem_seg.data == 1).float().mean() > 0.9
    assert inference(model, []) == []


def test_without_checkpoint_the_config_names_the_classes(project):
    model = init_model(project / 'tiny.py')
    assert model.dataset_meta['classes'] == ('dark', 'bright', 'unseen')


def test_bare_weights_will_do(project, trained, tmp_path, model):
    content = torch.load(trained / 'iter_30.pth')
    torch.save(content['state_dict'], tmp_path / 'bare.pth')
    bare = init_model(project / 'tiny.py', tmp_path / 'bare.pth')
    for name, value in model.state_dict().items():
        assert torch.equal(value, bare.state_dict()[name])


def test_options(project):
    model = init_model(
        project / 'tiny.py', cfg_options={'model.backbone.ffn': 'dwconv'}
    )
    assert model.cfg.model.backbone.ffn == 'dwconv'
    assert any('dwconv' in name for name, _ in model.named_modules())


def test_a_constant_prediction_is_measured_beside():
    """Three quarters of class 0, the rest of class 1, none of class 2."""
    label = torch.zeros(8, 8, dtype=torch.long)
    label[:4, :4] = 1
    metric = IoUMetric()
    metric.dataset_meta = {'classes': ('a', 'b', 'c')}
    sample = {
        'pred_sem_seg': {'data': label[None]},
        'gt_sem_seg': {'data': label},
    }
    metric.process({}, [sample])
    metrics = measure_areas(metric)
    assert metrics['mIoU'] == 100
    # Class 0 is right in three quarters of its union, class 1 nowhere.
    assert metrics['mIoU of a constant'] == pytest.approx(75 / 2)
    assert measure_areas(IoUMetric()) == {}
