# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# Classifiers are trained by epochs.
_base_ = './default_runtime.py'

log_processor = dict(by_epoch=True)
