# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# The harder cue: a legend assigns textures to classes anew in every scene, so
# every place has to look up its own texture.
_base_ = './infvit_seg_demo.py'

cue = dict(cue='legend')
train_dataloader = dict(dataset=dict(label_cue=True, **cue))
val_dataloader = dict(dataset=cue)
test_dataloader = dict(dataset=cue)
model = dict(decode_head=dict(num_classes=4))
