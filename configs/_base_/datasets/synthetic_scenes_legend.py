# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Four classes, told by a legend that is drawn anew in every scene.
_base_ = './synthetic_scenes.py'

train_dataloader = dict(dataset=dict(cue='legend', label_cue=True))
val_dataloader = dict(dataset=dict(cue='legend'))
test_dataloader = dict(dataset=dict(cue='legend'))
