# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Lets mmsegmentation's own tools find our models, data and hooks.
custom_imports = dict(imports=['infsa_seg'], allow_failed_imports=False)
default_scope = 'mmseg'

env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
vis_backends = [dict(type='LocalVisBackend')]
# No name: each run gets a visualizer of its own, and writes to its own place.
visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends)
log_processor = dict(type='ShortLogProcessor', by_epoch=False)
log_level = 'INFO'
load_from = None
resume = False

tta_model = dict(type='SegTTAModel')
