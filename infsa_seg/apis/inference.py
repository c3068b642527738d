# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A trained segmentor on images, in the same process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import mmseg.apis
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.model import BaseModel
from mmengine.registry import init_default_scope
from mmengine.structures import BaseDataElement
from mmseg.models import BaseSegmentor
from mmseg.registry import DATASETS, MODELS
from mmseg.structures import SegDataSample

from infsa_seg.models.classifiers import InfViTClassifier
from infsa_seg.models.utils import load_pretrained

from .config import load_config

Image = str | Path | np.ndarray


def init_model(
    config: str | Path | Config,
    checkpoint: str | Path | None = None,
    device: str = 'cpu',
    cfg_options: dict[str, Any] | None = None,
) -> BaseModel:
    """Build a model from a config, with weights, ready for inference.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        checkpoint (str | Path, optional): Weights, loaded in safe mode.
            Defaults to None: random weights.
        device (str): Such as ``'cpu'`` or ``'cuda:0'``.
        cfg_options (dict, optional): Values by dotted key.

    Returns:
        BaseModel: A segmentor or classifier, in evaluation mode. Its
        ``dataset_meta`` has the ``classes`` and ``palette`` of the
        checkpoint, else of the test data.

    Raises:
        FileNotFoundError: The config or the checkpoint is not there.
        ValueError: One of them is not usable.
    """
    cfg = load_config(config, cfg_options)
    init_default_scope(cfg.get('default_scope', 'mmseg'))
    kind = MODELS.get(cfg.model.type)
    if kind is not None and issubclass(kind, InfViTClassifier):
        # Upstream's function sets what only segmentors have.
        model = MODELS.build(cfg.model).to(device).eval()
        model.cfg = cfg
    else:
        model = mmseg.apis.init_model(cfg, device=device)
    meta = {}
    if checkpoint is not None:
        # Upstream's own loading is content when nothing in a file fits.
        report = load_pretrained(model, str(checkpoint))
        meta = report.meta.get('dataset_meta', {})
    model.dataset_meta = meta or _test_meta(cfg)
    return model


def _test_meta(cfg: Config) -> dict[str, Any]:
    """Classes and palette of a config's test data, which may be absent."""
    dataset = {**cfg.test_dataloader.dataset, 'lazy_init': True}
    return DATASETS.build(dataset).metainfo


@overload
def inference(model: BaseSegmentor, images: Image) -> SegDataSample: ...


@overload
def inference(
    model: BaseSegmentor, images: Sequence[Image]
) -> list[SegDataSample]: ...


def inference(
    model: BaseSegmentor, images: Image | Sequence[Image]
) -> SegDataSample | list[SegDataSample]:
    """Segment whole images, each in one forward pass.

    Args:
        model (BaseSegmentor): From :func:`init_model`.
        images (str | Path | np.ndarray | Sequence): Files, or arrays of
            shape (rows, columns, 3) in BGR order, uint8; not both at once.

    Returns:
        SegDataSample | list[SegDataSample]: For one image a sample, for a
        sequence a list. ``pred_sem_seg.data`` is (1, rows, columns), int64,
        class indices at the size of the image.
    """
    if isinstance(images, (str, Path, np.ndarray)):
        return inference(model, [images])[0]
    if not len(images):
        return []
    arrays = isinstance(images[0], np.ndarray)
    # The config's own loader suits the test data, and not always these.
    loader = 'LoadImageFromNDArray' if arrays else 'LoadImageFromFile'
    model.cfg.test_pipeline = [
        {'type': loader},
        *(
            step
            for step in model.cfg.test_pipeline
            if not step['type'].startswith('Load')
        ),
    ]
    return mmseg.apis.inference_model(
        model, list(images) if arrays else [str(image) for image in images]
    )


def classify(
    model: BaseModel, images: Sequence[str | Path]
) -> list[BaseDataElement]:
    """Classify picture files, each prepared as the config's test data are.

    Args:
        model (BaseModel): A classifier, from :func:`init_model`.
        images (Sequence[str | Path]): Files.

    Returns:
        list[BaseDataElement]: For each ``pred_label``, the index of a class,
        and ``pred_score`` (classes), which sums to one.

    Raises:
        OSError: A file cannot be read.
        ValueError: One cannot be decoded.
    """
    pipeline = Compose(model.cfg.test_dataloader.dataset.pipeline)
    samples = []
    for image in images:
        packed = pipeline({'img_path': str(image)})
        with torch.no_grad():
            samples += model.test_step(
                {
                    'inputs': [packed['inputs']],
                    'data_samples': [packed['data_samples']],
                }
            )
    return samples
