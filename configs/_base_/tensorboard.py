# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# After default_runtime.py in `_base_`; needs pip install tensorboard.
# tensorboard --logdir work_dirs
vis_backends = [
    dict(type='LocalVisBackend'),
    dict(type='TensorboardVisBackend'),
]
visualizer = dict(type='SegLocalVisualizer', vis_backends=vis_backends)
