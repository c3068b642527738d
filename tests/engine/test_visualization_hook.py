# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmengine.structures import PixelData
from mmengine.visualization import LocalVisBackend
from mmseg.structures import SegDataSample
from mmseg.visualization import SegLocalVisualizer

from infsa_seg.engine import InputVisualizationHook


@pytest.fixture
def pictures(tmp_path):
    visualizer = SegLocalVisualizer.get_instance(
        str(tmp_path),
        vis_backends=[LocalVisBackend(str(tmp_path))],
        classes=['a', 'b'],
        palette=[[255, 0, 0], [0, 0, 255]],
        alpha=0.5,
    )
    visualizer.dataset_meta = {
        'classes': ['a', 'b'],
        'palette': [[255, 0, 0], [0, 0, 255]],
    }
    return lambda: sorted(tmp_path.rglob('*.png'))


def batch(size):
    """A blue image without a file, all of it predicted as class 0, red."""
    image = torch.zeros(3, 4, 6, dtype=torch.uint8)
    image[0] = 200
    sample = SegDataSample(metainfo={'img_path': 'scene-7'})
    sample.pred_sem_seg = PixelData(data=torch.zeros(1, *size, dtype=int))
    return {'inputs': [image]}, [sample]


@pytest.mark.parametrize('size', [(4, 6), (64, 96)])
def test_draws_the_input_at_the_size_of_the_prediction(pictures, size):
    hook = InputVisualizationHook(draw=True, interval=1)
    hook.after_test_iter(SimpleNamespace(iter=0), 0, *batch(size))
    (path,) = pictures()
    assert path.name == 'test_scene-7_0.png'
    drawn = cv2.imread(str(path))
    assert drawn.shape == (*size, 3)
    np.testing.assert_allclose(drawn[-1, -1], [100, 0, 127], atol=1)


def test_draws_every_so_many_and_never_in_training(pictures):
    hook = InputVisualizationHook(draw=True, interval=2)
    runner = SimpleNamespace(iter=0)
    hook.after_test_iter(runner, 0, *batch((4, 6)))
    hook.after_train_iter(runner, 1, *batch((4, 6)))
    assert pictures() == []
    hook.after_val_iter(runner, 1, *batch((4, 6)))
    assert len(pictures()) == 1
