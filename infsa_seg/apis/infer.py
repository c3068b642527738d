# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Class maps of picture files and of synthetic scenes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmseg.evaluation import IoUMetric
from mmseg.models import BaseSegmentor
from mmseg.registry import DATASETS
from PIL import Image

from infsa_seg.datasets import Scene, SyntheticScenes

from .errors import one_line
from .inference import inference, init_model
from .pictures import read_image, write_mask, write_overlay
from .progress import progress

IGNORED = 255
_SCENE = re.compile(r'scene:(\d+)(?:x(\d+))?(?::(\d+))?')


@dataclass(frozen=True)
class InferResult:
    """What :func:`infer` did.

    Attributes:
        written (tuple[Path]): The files, in order.
        failures (dict[str, str]): Reason by input.
        metrics (dict[str, float]): ``mIoU`` and the like, in percent, over
            all inputs whose labels are known, and ``mIoU of a constant``, of
            the most frequent class everywhere; empty without labels.
    """

    written: tuple[Path, ...]
    failures: dict[str, str]
    metrics: dict[str, float]


def infer(
    config: str | Path | Config,
    checkpoint: str,
    inputs: Sequence[str],
    out: str | Path,
    labels: str | Path | None = None,
    device: str | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> InferResult:
    """Segment each input as a whole; go on where one fails.

    For each it writes ``NAME_mask.png``, class indices with a palette, and
    ``NAME_overlay.png``, the picture under its classes with a legend.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        checkpoint (str): Weights.
        inputs (sequence): Picture files, and ``scene:SIZE[:NUMBER]`` or
            ``scene:ROWSxCOLS[:NUMBER]`` for a scene like those that the
            config tests with.
        out (str | Path): Directory to write to; made if need be.
        labels (str | Path, optional): Directory with ``NAME.png`` for each
            picture ``NAME.*``: class indices, other values are ignored.
        device (str, optional): Defaults to a GPU, if there is one.
        cfg_options (dict, optional): Values by dotted key.

    Returns:
        InferResult: What was written, what failed, and the metrics.

    Raises:
        FileNotFoundError: The config or the checkpoint is not there.
        ValueError: One of them is not usable.
    """
    model = init_model(config, checkpoint, device or get_device(), cfg_options)
    if not isinstance(model, BaseSegmentor):
        raise ValueError(
            f'{type(model).__name__} has one label for an image; use '
            'tools/infer_large.py'
        )
    metric = IoUMetric(ignore_index=IGNORED)
    metric.dataset_meta = model.dataset_meta
    written: list[Path] = []
    failures: dict[str, str] = {}
    for name in progress(inputs, 'Inference'):
        try:
            _infer_one(model, name, Path(out), labels, metric, written)
        # RuntimeError is how PyTorch says that memory does not suffice.
        except (ValueError, OSError, RuntimeError) as error:
            failures[name] = one_line(error).removeprefix(f'{name}: ')
    return InferResult(tuple(written), failures, measure_areas(metric))


def measure_areas(metric: IoUMetric) -> dict[str, float]:
    """The metrics of the images that were counted; empty if there are none."""
    if not metric.results:
        return {}
    # Per input: pixels of intersection, union, prediction and label by class.
    label = sum(areas[3] for areas in metric.results)
    constant = 100 * label.max() / label.sum() / (label > 0).sum()
    metrics = metric.evaluate(len(metric.results))
    return {**metrics, 'mIoU of a constant': float(constant)}


def _infer_one(
    model: BaseSegmentor,
    name: str,
    out: Path,
    labels: str | Path | None,
    metric: IoUMetric,
    written: list[Path],
) -> None:
    """Segment one input, write its files and count it where labels exist."""
    if name.startswith('scene:'):
        stem, image, label = draw_scene(name, model.cfg)
    else:
        stem, image, label = Path(name).stem, read_image(name), None
        if labels is not None:
            label = _read_label(Path(labels, f'{stem}.png'), image)
    mask_path, overlay_path = (
        out / f'{stem}_{kind}.png' for kind in ('mask', 'overlay')
    )
    if mask_path in written:
        raise ValueError(f'{mask_path} is the result of another input already')

    mask = inference(model, image).pred_sem_seg.data[0].cpu()
    classes = model.dataset_meta['classes']
    palette = model.dataset_meta['palette']
    write_mask(mask_path, mask.numpy(), palette)
    write_overlay(overlay_path, image, mask.numpy(), classes, palette)
    written += mask_path, overlay_path
    if label is not None:
        label = np.where(label < len(classes), label, IGNORED)
        sample = {
            'pred_sem_seg': {'data': mask},
            'gt_sem_seg': {'data': torch.from_numpy(label)},
        }
        metric.process({}, [sample])


def _read_label(path: Path, image: np.ndarray) -> np.ndarray:
    with Image.open(path) as picture:
        label = np.array(picture)
    if label.shape != image.shape[:2]:
        raise ValueError(
            f'{path}: shape {label.shape} for an image of '
            f'{image.shape[:2]}; one class index per pixel is needed'
        )
    return label


def draw_scene(name: str, cfg: Config) -> tuple[str, np.ndarray, np.ndarray]:
    """Name, image (BGR) and label of the scene that a name stands for."""
    stem, scene = parse_scene(name, cfg)
    rgb, label = scene.read()
    return stem, np.ascontiguousarray(rgb[..., ::-1]), label


def parse_scene(name: str, cfg: Config) -> tuple[str, Scene]:
    """A scene like those the config tests with, and a name for its files.

    Args:
        name (str): ``scene:SIZE[:NUMBER]`` or ``scene:ROWSxCOLS[:NUMBER]``.
        cfg (Config): Its test data say what the scene looks like.

    Raises:
        ValueError: The name is another, or the config tests on other data.
    """
    match = _SCENE.fullmatch(name)
    if not match:
        raise ValueError(
            f'{name}: write scene:SIZE, scene:ROWSxCOLS, and :NUMBER after it '
            'for another one'
        )
    kind = cfg.test_dataloader.dataset
    if kind.type != SyntheticScenes.__name__:
        raise ValueError(
            f'{name}: the config tests on {kind.type}, so what its scenes '
            'look like is not known'
        )
    rows, cols, number = match.groups()
    size, index = (int(rows), int(cols or rows)), int(number or 0)
    scenes = DATASETS.build({**kind, 'size': size, 'lazy_init': True})
    stem = f'scene-{size[0]}x{size[1]}-{index}'
    return stem, replace(scenes.first_scene, index=index)
