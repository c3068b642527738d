# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
# torchrun --nproc_per_node=N tools/train.py CONFIG --launcher pytorch
runner_type = 'FlexibleRunner'
strategy = dict(
    type='ZeroStrategy',
    stage=2,
    bf16=dict(enabled=True),
    # DeepSpeed makes a buffer of this size, 0.9 GiB by default.
    zero_optimization=dict(reduce_bucket_size=50_000_000),
)
