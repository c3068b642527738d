# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Training of a classifier, for the weights of its backbone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.runner import find_latest_checkpoint
from mmseg.registry import MODELS

from infsa_seg.engine import atomic_path
from infsa_seg.models.utils import check_checkpoint
from infsa_seg.version import __version__

from .checkpoints import plain_file
from .config import load_config
from .runner import evaluate, train

EXPORT = 'backbone.pth'
_BACKBONE = 'backbone.'


@dataclass(frozen=True)
class PretrainResult:
    """What :func:`pretrain` leaves.

    Attributes:
        metrics (dict[str, float]): On the test data, in percent.
        weights (Path): The exported backbone.
        checkpoint (Path): The checkpoint that it is of.
    """

    metrics: dict[str, float]
    weights: Path
    checkpoint: Path


def pretrain(
    config: str | Path | Config,
    work_dir: str | None = None,
    resume: bool | str = False,
    amp: bool = False,
    out: str | None = None,
    cfg_options: dict[str, Any] | None = None,
    launcher: str = 'none',
    zero_stage: int | None = None,
) -> PretrainResult | None:
    """Train a classifier, measure it, and export its backbone.

    Measured and exported are the last weights, or their moving average where
    the config has mmengine's ``EMAHook``.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        work_dir, resume, amp, cfg_options, launcher, zero_stage: As for
            :func:`train`.
        out (str, optional): File for the backbone. Defaults to
            ``backbone.pth`` in the work directory.

    Returns:
        PretrainResult: None in all processes but the first, if there are
        several.

    Raises:
        FileNotFoundError: The config, a checkpoint or the data is not there.
        ImportError: ZeRO is asked for, and DeepSpeed is not installed; or
            kornia is needed and not.
        ValueError: One of them, or an option, is not usable.
    """
    cfg = load_config(config, cfg_options)
    if work_dir is None:
        work_dir = cfg.get('work_dir') or str(
            Path('work_dirs', Path(cfg.filename or 'infsa_seg').stem)
        )
    target = Path(out or Path(work_dir, EXPORT))
    _check(cfg, target, zero_stage)
    with_zero = zero_stage is not None or bool(cfg.get('strategy'))
    train(
        cfg,
        work_dir=work_dir,
        resume=resume,
        amp=amp,
        launcher=launcher,
        zero_stage=zero_stage,
    )
    # Of processes that ZeRO has let go, one can do the rest.
    first = launcher == 'none' or int(os.environ.get('RANK', 0)) == 0
    if with_zero and not first:
        return None
    last = find_latest_checkpoint(work_dir)
    if last is None:
        raise ValueError(
            f'{work_dir}: training left no checkpoint; set '
            'default_hooks.checkpoint of the config'
        )
    with plain_file(last, work_dir) as checkpoint:
        metrics = evaluate(
            cfg,
            checkpoint,
            work_dir=work_dir,
            launcher='none' if with_zero else launcher,
        )
        if not first:
            return None
        export_backbone(cfg, checkpoint, target, metrics)
    return PretrainResult(metrics, target, Path(last))


def export_backbone(
    config: str | Path | Config,
    checkpoint: str | Path,
    out: str | Path,
    metrics: dict[str, float] | None = None,
) -> None:
    """Write the backbone of a classifier to a file of its own.

    It is ready for ``init_cfg=dict(type='Pretrained', checkpoint=out)`` of
    the same ``InfViT`` in another model; positions are resampled to its grid.

    Args:
        config (str | Path | Config): Of the classifier.
        checkpoint (str | Path): Its weights, or a folder of ZeRO.
        out (str | Path): File to write: ``state_dict`` and ``meta``, which
            has ``backbone`` (its settings), ``grid`` (rows and columns of the
            positions) and ``patch_size``; ``mean``, ``std`` and ``bgr_to_rgb``
            of the pictures; ``classes``, ``metrics`` and ``infsa_seg``, the
            version.
        metrics (dict, optional): What it achieved.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It is not one of this classifier.
    """
    cfg = load_config(config)
    with plain_file(checkpoint, Path(out).parent) as file:
        check_checkpoint(file)
        content = torch.load(file, map_location='cpu', weights_only=True)
    state = {
        name.removeprefix(_BACKBONE): value
        for name, value in content.get('state_dict', content).items()
        if name.startswith(_BACKBONE)
    }
    backbone = {
        **cfg.model.backbone.to_dict(),
        'init_cfg': None,
    }
    with torch.device('meta'):
        model = MODELS.build(backbone)
    try:
        # A copy: loading resamples in place what does not fit.
        missing, unexpected = model.load_state_dict(
            dict(state), strict=False, assign=True
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise ValueError(f'{checkpoint}: {reason}') from error
    if missing or unexpected:
        raise ValueError(
            f'{checkpoint}: is not of this model; it lacks {missing[:3]} and '
            f'has {unexpected[:3]} instead'
        )
    pictures = cfg.model.get('data_preprocessor') or {}
    classes = content.get('meta', {}).get('dataset_meta', {})
    meta = {
        'backbone': backbone,
        'grid': list(state['position.weight'].shape[:2]),
        'patch_size': model.patch_size,
        'mean': list(pictures.get('mean', [0.0, 0.0, 0.0])),
        'std': list(pictures.get('std', [1.0, 1.0, 1.0])),
        'bgr_to_rgb': bool(pictures.get('bgr_to_rgb', False)),
        'classes': list((classes or {}).get('classes', [])),
        'metrics': {k: float(v) for k, v in (metrics or {}).items()},
        'infsa_seg': __version__,
    }
    with atomic_path(out) as part:
        torch.save({'state_dict': state, 'meta': meta}, part)
    print_log(f'{out}: the backbone, ready for init_cfg', logger='current')


def _check(cfg: Config, target: Path, zero_stage: int | None) -> None:
    """Find out before training, not after."""
    if target.is_dir():
        raise ValueError(f'{target}: a folder; name the file to write (--out)')
    if cfg.model.get('type') != 'InfViTClassifier':
        raise ValueError(
            f'{cfg.filename}: trains a {cfg.model.get("type")}, not an '
            'InfViTClassifier; use tools/train.py'
        )
    if zero_stage is None and not cfg.get('strategy'):
        return
    if any(h.get('type') == 'EMAHook' for h in cfg.get('custom_hooks') or ()):
        raise ValueError(
            'custom_hooks: checkpoints of ZeRO hold the weights, not the '
            "average of EMAHook; leave it out: --cfg-options custom_hooks='[]'"
        )
