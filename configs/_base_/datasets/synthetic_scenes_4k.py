# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Scenes of 4096 x 4096, each seen whole: the cue is 16 patches of 65,536.
_base_ = './synthetic_scenes.py'

crop_size = (4096, 4096)
scene = dict(size=crop_size, patch=16)
train_dataloader = dict(batch_size=1, dataset=scene)
val_dataloader = dict(batch_size=1, dataset=dict(num_scenes=8, **scene))
test_dataloader = dict(batch_size=1, dataset=dict(num_scenes=16, **scene))
