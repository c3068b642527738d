# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What several hooks ask of a runner."""

from mmengine.hooks import LoggerHook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from infsa_seg.execution import SpatialParallel


def bare_model(runner: Runner) -> nn.Module:
    """The model without what distributes it."""
    model = runner.model
    while is_model_wrapper(model):
        model = model.module
    return model


def log_interval(runner: Runner, default: int = 50) -> int:
    """Iterations between two lines of the log."""
    for hook in runner.hooks:
        if isinstance(hook, LoggerHook):
            return hook.interval
    return default


def spatial_parallel(runner: Runner) -> SpatialParallel | None:
    """The group that shares each image, None where each rank has its own."""
    return getattr(bare_model(runner), 'spatial_parallel', None)


def uses_deepspeed(runner: Runner) -> bool:
    """Whether DeepSpeed trains the model."""
    return hasattr(runner.model, 'get_global_grad_norm')
