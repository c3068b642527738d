# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Training and testing as a config says, on mmengine's runner."""

from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.runner import Runner, find_latest_checkpoint
from mmseg.registry import RUNNERS
from torch import nn

from infsa_seg.engine import ZeroFolder, leave_group, require_deepspeed
from infsa_seg.engine.zero_checkpoint import CONVERTER
from infsa_seg.models.utils import check_checkpoint

from .checkpoints import plain_file
from .config import load_config

ZERO = 'ZeroStrategy'


def train(
    config: str | Path | Config,
    work_dir: str | None = None,
    resume: bool | str = False,
    amp: bool = False,
    cfg_options: dict[str, Any] | None = None,
    launcher: str = 'none',
    zero_stage: int | None = None,
    spatial_parallel_size: int | None = None,
) -> nn.Module:
    """Train a segmentor.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        work_dir (str, optional): Where logs and checkpoints go. Defaults to
            the config's ``work_dir``, else ``work_dirs/CONFIG_NAME``.
        resume (bool | str): A checkpoint to go on from, or True for the last
            one in the work directory, if there is one.
        amp (bool): Train in mixed precision.
        cfg_options (dict, optional): Values by dotted key.
        launcher (str): ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        zero_stage (int, optional): Train with DeepSpeed's ZeRO, stage 0 to
            3, whatever stage the config's ``strategy`` has.
        spatial_parallel_size (int, optional): Processes that share an image,
            a band of its rows on each; DeepSpeed joins them.

    Returns:
        nn.Module: The trained segmentor. What ZeRO stage 3 has divided stays
        so: its weights are in the checkpoints only.

    Raises:
        FileNotFoundError: The config, a checkpoint or the data is not there.
        ImportError: ZeRO is asked for, and DeepSpeed is not installed.
        ValueError: One of them, or an option, is not usable.
    """
    cfg = _prepare(config, work_dir, cfg_options, launcher)
    if 'strategy' in cfg and not cfg.strategy:
        _disable_strategy(cfg)
    if zero_stage is not None:
        _enable_zero(cfg, '--zero-stage', stage=zero_stage)
    if spatial_parallel_size is not None:
        _enable_zero(
            cfg,
            '--spatial-parallel-size',
            spatial_parallel_size=spatial_parallel_size,
        )
    if amp and _uses_zero(cfg):
        raise ValueError(
            '--amp: with ZeRO say --cfg-options strategy.bf16.enabled=True, '
            'or fp16'
        )
    if amp:
        _enable_amp(cfg)
    if resume:
        _enable_resume(cfg, resume)
    if _uses_zero(cfg):
        return _train_with_zero(cfg)
    _check_weights(cfg)
    return _build_runner(cfg).train()


def evaluate(
    config: str | Path | Config,
    checkpoint: str,
    work_dir: str | None = None,
    out: str | None = None,
    show: bool = False,
    show_dir: str | None = None,
    wait_time: float = 2.0,
    tta: bool = False,
    cfg_options: dict[str, Any] | None = None,
    launcher: str = 'none',
) -> dict[str, float]:
    """Measure a segmentor on the test data of its config.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        checkpoint (str): Weights to test: a file, or a folder of ZeRO.
        work_dir (str, optional): As for :func:`train`; metrics go there.
        out (str, optional): Directory for the predictions, as PNG masks of
            class indices.
        show (bool): Show the predictions in a window.
        show_dir (str, optional): Directory for pictures of the predictions.
        wait_time (float): Seconds for which each window stays.
        tta (bool): Test-time augmentation, as ``tta_model`` and
            ``tta_pipeline`` of the config say.
        cfg_options (dict, optional): Values by dotted key.
        launcher (str): ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.

    Returns:
        dict[str, float]: The metrics, in percent.

    Raises:
        FileNotFoundError: The config, the checkpoint or the data is not
            there.
        ValueError: One of them, or an option, is not usable.
    """
    cfg = _prepare(config, work_dir, cfg_options, launcher)
    cfg.resume = False
    if out:
        _save_predictions(cfg, out)
    if show or show_dir:
        _enable_pictures(cfg, show, show_dir, wait_time)
    if tta:
        _enable_tta(cfg)
    if _uses_zero(cfg):
        # Weights alone fit in one process.
        _disable_strategy(cfg)
    with plain_file(checkpoint, cfg.work_dir) as cfg.load_from:
        _check_weights(cfg)
        return _build_runner(cfg).test()


def _prepare(
    config: str | Path | Config,
    work_dir: str | None,
    cfg_options: dict[str, Any] | None,
    launcher: str,
) -> Config:
    cfg = load_config(config, cfg_options)
    cfg.launcher = launcher
    if work_dir:
        cfg.work_dir = work_dir
    elif not cfg.get('work_dir'):
        name = Path(cfg.filename or 'infsa_seg').stem
        cfg.work_dir = str(Path('work_dirs', name))
    return cfg


def _build_runner(cfg: Config) -> Runner:
    if cfg.get('strategy'):
        cfg.runner_type = 'FlexibleRunner'
        # It reads this one whether it is there or not.
        cfg.setdefault('env_cfg', {})
    if 'runner_type' in cfg:
        return RUNNERS.build(cfg)
    if cfg.launcher != 'none' and get_device() == 'cpu':
        raise ValueError(
            f"--launcher {cfg.launcher}: mmengine's Runner spreads over GPUs "
            'only, and none was found'
        )
    return Runner.from_cfg(cfg)


def _disable_strategy(cfg: Config) -> None:
    for name in ('strategy', 'runner_type'):
        cfg.pop(name, None)


def _uses_zero(cfg: Config) -> bool:
    strategy = cfg.get('strategy')
    # Options alone, from --cfg-options, are ours too.
    return bool(strategy) and strategy.get('type', ZERO) == ZERO


def _enable_zero(cfg: Config, option: str, **settings: int) -> None:
    cfg.setdefault('strategy', dict(type=ZERO))
    if not _uses_zero(cfg):
        raise ValueError(
            f'{option}: the config has the strategy {cfg.strategy.type}, not '
            f'{ZERO}'
        )
    cfg.strategy.update(settings)


def _train_with_zero(cfg: Config) -> nn.Module:
    try:
        require_deepspeed()
    except ImportError as error:
        raise ImportError(
            f'{error}, or train without it: --cfg-options strategy=None'
        ) from error
    cfg.strategy.type = ZERO
    if cfg.strategy.get('spatial_parallel_size', 1) > 1:
        _seed_iterations(cfg)
    if cfg.get('load_from') and cfg.get('resume'):
        ZeroFolder(cfg.load_from)
    elif cfg.get('load_from'):
        _check_weights(cfg)
        # Before the model is divided, not after.
        cfg.strategy.load_from = cfg.load_from
        cfg.load_from = None
    joined = torch.distributed.is_initialized()
    try:
        model = _build_runner(cfg).train()
    finally:
        if not joined:
            leave_group()
    return model.module


def _seed_iterations(cfg: Config) -> None:
    """Let the processes that share an image make the same choices."""
    kind = cfg.train_cfg.get('type', 'IterBasedTrainLoop')
    if kind not in ('IterBasedTrainLoop', 'SeededTrainLoop'):
        raise ValueError(
            f'spatial_parallel_size: does not go with train_cfg {kind}; use '
            "dict(type='SeededTrainLoop', max_iters=...)"
        )
    cfg.train_cfg.type = 'SeededTrainLoop'


def _check_weights(cfg: Config) -> None:
    """Find out before anything is built, not after the data is indexed."""
    if Path(cfg.get('load_from') or '').is_dir() and cfg.load_from:
        way = 'train with --zero-stage, or ' if cfg.get('resume') else ''
        raise ValueError(
            f'{cfg.load_from}: a folder, as ZeRO saves checkpoints; {way}make '
            f'a plain one of it with {CONVERTER}'
        )
    if cfg.get('load_from') and '://' not in cfg.load_from:
        check_checkpoint(cfg.load_from)


def _enable_amp(cfg: Config) -> None:
    if get_device() in ('cpu', 'mps'):
        raise ValueError('--amp: mixed precision needs a GPU, none was found')
    kind = cfg.optim_wrapper.get('type', 'OptimWrapper')
    if kind not in ('OptimWrapper', 'AmpOptimWrapper'):
        raise ValueError(f'--amp: does not go with optim_wrapper {kind}')
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')


def _enable_resume(cfg: Config, resume: bool | str) -> None:
    if resume is True:
        # mmengine would drop `load_from` where there is nothing to resume.
        resume = find_latest_checkpoint(cfg.work_dir)
        if not resume:
            print_log(f'{cfg.work_dir}: no checkpoint, training starts anew')
            return
    cfg.resume = True
    cfg.load_from = resume


def _save_predictions(cfg: Config, out: str) -> None:
    evaluators = cfg.test_evaluator
    if not isinstance(evaluators, list):
        evaluators = [evaluators]
    for evaluator in evaluators:
        if evaluator.type == 'IoUMetric':
            evaluator.output_dir = out
            return
    raise ValueError('--out: test_evaluator has no IoUMetric to write masks')


def _enable_pictures(
    cfg: Config, show: bool, show_dir: str | None, wait_time: float
) -> None:
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise ValueError(
            '--show: the config has no default_hooks.visualization; use '
            "dict(type='InputVisualizationHook')"
        )
    hook.update(draw=True, interval=1, show=show, wait_time=wait_time)
    if show_dir:
        cfg.visualizer.save_dir = show_dir


def _enable_tta(cfg: Config) -> None:
    missing = {'tta_model', 'tta_pipeline'} - set(cfg)
    if missing:
        raise ValueError(f'--tta: the config has no {min(missing)}')
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    cfg.tta_model.module = cfg.model
    cfg.model = cfg.tta_model
