# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# In place of default_runtime.py; needs pip install tensorboard.
# tensorboard --logdir work_dirs
_base_ = './default_runtime.py'

vis_backends = [
    dict(type='LocalVisBackend'),
    dict(type='TensorboardVisBackend'),
]
visualizer = dict(vis_backends=vis_backends)
