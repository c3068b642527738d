# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import re

import cv2
import numpy as np
from mmengine.config import Config
from mmseg.registry import DATASETS
from PIL import Image

from tests.apis.conftest import REPO

README = (REPO / 'infsa_seg/datasets/README.md').read_text()
SNIPPET, CONFIG = re.findall(r'```python\n(.*?)```', README, re.DOTALL)


def test_the_snippet_draws_scenes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(SNIPPET, names)
    assert cv2.imread('scene.png').shape == (512, 512, 3)
    assert names['rgb'].shape == (512, 512, 3)
    assert names['label'].shape == (512, 512)


def test_the_config_reads_binary_masks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, suffix in ('img', '.tif'), ('ann', '.png'):
        path = tmp_path / f'data/orchards/{folder}/val/a{suffix}'
        path.parent.mkdir(parents=True)
        pixels = np.zeros((8, 8, 3) if folder == 'img' else (8, 8), np.uint8)
        pixels[:3] = 255
        Image.fromarray(pixels).save(path)
    config = tmp_path / 'orchards.py'
    config.write_text(CONFIG.replace('infsa_seg::', f'{REPO}/configs/'))
    cfg = Config.fromfile(config)
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    label = dataset[0]['data_samples'].gt_sem_seg.data[0]
    assert (label[:3] == 1).all() and (label[3:] == 0).all()
