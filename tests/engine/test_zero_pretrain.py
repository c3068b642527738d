# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pretraining under ZeRO: what is exported is whole and in full precision."""

import pytest
import torch
from mmseg.registry import MODELS

pytest.importorskip('deepspeed')

from infsa_seg.apis.pretrain import pretrain
from infsa_seg.engine import ZeroFolder
from tests.tools.test_pretrain import folder, no_layout_of_configs

__all__ = ['folder', 'no_layout_of_configs']


def test_divided_weights_in_bf16_are_exported_whole(folder, tmp_path):
    result = pretrain(
        folder / 'two.py',
        work_dir=str(tmp_path / 'work'),
        zero_stage=3,
        cfg_options={
            'custom_hooks': [],
            'train_cfg.max_epochs': 1,
            'train_cfg.val_interval': 1,
            'strategy.bf16.enabled': True,
            'model.pool': 'cls_token',
        },
    )
    assert result.metrics['accuracy/top5'] == 100
    # DeepSpeed's own reading of the folder.
    ZeroFolder(result.checkpoint).convert(tmp_path / 'all.pth')
    whole = torch.load(tmp_path / 'all.pth', weights_only=True)['state_dict']
    content = torch.load(result.weights, weights_only=True)
    assert len(content['state_dict']) > 20
    for name, value in content['state_dict'].items():
        torch.testing.assert_close(
            value, whole[f'backbone.{name}'], rtol=0, atol=0
        )
        assert value.dtype in (torch.float32, torch.int64), name
    assert 'cls_token' in whole and 'cls_token' not in content['state_dict']
    backbone = MODELS.build(content['meta']['backbone'])
    backbone.load_state_dict(content['state_dict'])
    assert content['meta']['classes'] == ['n01', 'n02']
    assert not list((tmp_path / 'work').glob('.zero-*'))
