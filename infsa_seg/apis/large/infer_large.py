# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Class maps and labels of images of any size, in a set amount of memory."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import BaseModel
from mmseg.evaluation import IoUMetric

from infsa_seg.layers import GlobalBranch
from infsa_seg.layers.protocol import Network
from infsa_seg.models.classifiers import InfViTClassifier
from infsa_seg.raster import RasterReader

from ..errors import one_line
from ..infer import measure_areas
from ..inference import init_model
from .job import LargeJob, LargeResult
from .label_job import LabelJob
from .mask_job import MaskJob
from .options import DTYPES, LargeOptions
from .paths import is_file, paths_of
from .sources import open_source, stem_of

# What a folder is searched for.
SUFFIXES = (
    *('.tif', '.tiff', '.vrt', '.jp2'),
    *('.svs', '.ndpi', '.mrxs', '.scn', '.bif', '.vms', '.svslide', '.dcm'),
    *('.png', '.jpg', '.jpeg', '.bmp', '.webp', '.npy'),
)


def infer_large_image(
    model: BaseModel,
    source: str | Path | RasterReader,
    out: str | Path,
    on_plan: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    **options: Any,
) -> LargeResult:
    """Segment or classify an image of any size as a whole, in bands.

    The classes are those of one forward pass over the whole image, whatever
    the memory, the store and the bands. Pixels that the raster marks as not
    valid have no influence and get the nodata value of the mask.

    A segmentor writes a mask. A classifier writes one label with the scores
    of all classes, and how much each token receives from all others in the
    last attention.

    Args:
        model (BaseModel): From :func:`infsa_seg.apis.init_model`. It is
            left as it is.
        source (str | Path | RasterReader): A raster, or ``scene:SIZE`` where
            the model's config tests on scenes.
        out (str | Path): A directory for ``NAME_mask.tif``, or the file of
            the mask; of a classifier ``NAME_label.json``. Others lie beside
            it.
        on_plan (callable, optional): Called before the start, with lines
            like those of :func:`plan_large_image`.
        on_note (callable, optional): Called before the start, and at the end,
            with each of the result's ``notes``.
        **options: See :class:`LargeOptions`.

    Returns:
        LargeResult: The files and what was measured.

    Raises:
        OSError: The image cannot be read, a file exists or cannot be written,
            or the disk has not enough space.
        ValueError: The model cannot run in bands, does not fit the image, or
            the memory does not suffice. No file is left behind.
    """
    with _job(model, source, out, options) as job:
        return job.run(on_plan, on_note)


def plan_large_image(
    model: BaseModel,
    source: str | Path | RasterReader,
    out: str | Path,
    **options: Any,
) -> str:
    """What :func:`infer_large_image` would take, in lines for people.

    The weights do not matter; nothing is written.
    """
    with _job(model, source, out, options) as job:
        return job.describe()


@contextmanager
def _job(
    model: BaseModel,
    source: str | Path | RasterReader,
    out: str | Path,
    options: dict[str, Any],
) -> Iterator[LargeJob]:
    """An image that is ready to start."""
    kind = _kind_of(model)
    settings = kind.options_of(model, LargeOptions(**options))
    model = _cast(model, DTYPES[settings.dtype])
    with (
        open_source(model, source, settings) as opened,
        _ranking(kind.network_of(model), settings.centrality),
    ):
        yield kind(model, opened, out, settings)


def _kind_of(model: BaseModel) -> type[LargeJob]:
    return LabelJob if isinstance(model, InfViTClassifier) else MaskJob


@dataclasses.dataclass(frozen=True)
class LargeResults:
    """What became of several inputs.

    Attributes:
        results (dict[str, LargeResult]): By input.
        failures (dict[str, str]): Reason by input.
        metrics (dict[str, float]): As of :class:`InferResult`.
    """

    results: dict[str, LargeResult]
    failures: dict[str, str]
    metrics: dict[str, float]


def infer_large(
    config: str | Path | Config,
    checkpoint: str | None,
    inputs: Sequence[str],
    out: str | Path,
    device: str | None = None,
    cfg_options: dict[str, Any] | None = None,
    plan: bool = False,
    say: Callable[[str], None] = print,
    warn: Callable[[str], None] = warnings.warn,
    **options: Any,
) -> LargeResults:
    """Segment or classify every input; go on where one fails.

    Args:
        config (str | Path | Config): As for
            :func:`infsa_seg.apis.load_config`.
        checkpoint (str, optional): Weights; not read with ``plan``.
        inputs (sequence): Files, directories, patterns and scenes.
        out (str | Path): As for :func:`infer_large_image`; a directory if
            there are several inputs.
        device (str, optional): Defaults to a GPU, if there is one.
        cfg_options (dict, optional): Values by dotted key.
        plan (bool): Only say what each would take.
        say (callable): Takes lines for the user.
        warn (callable): Takes what looks wrong.
        **options: See :class:`LargeOptions`.

    Raises:
        OSError: The config or the checkpoint is not there.
        ValueError: One of them, or an option, is not usable.
    """
    settings = LargeOptions(**options)
    names = expand(inputs)
    model = init_model(
        config,
        None if plan else checkpoint,
        device or get_device(),
        cfg_options,
    )
    kind = _kind_of(model)
    kind.network_of(model)
    settings = kind.options_of(model, settings)
    if len(names) > 1 and is_file(out, kind.kind):
        raise ValueError(
            f'{out}: is one file for {len(names)} inputs; give a directory'
        )
    model = _cast(model, DTYPES[settings.dtype])
    results: dict[str, LargeResult] = {}
    failures: dict[str, str] = {}
    metric = IoUMetric(ignore_index=255)
    metric.dataset_meta = model.dataset_meta
    written: set[Path] = set()
    for name in names:
        try:
            if plan:
                say(plan_large_image(model, name, out, **options))
                continue
            stem = stem_of(model, name)
            path = paths_of(out, stem, settings, kind.kind)[kind.kind]
            if path in written:
                raise ValueError(f'{path} is the result of another input')
            result = infer_large_image(
                *(model, name, out, say),
                lambda note, name=name: warn(f'{name}: {note}'),  # type: ignore
                **options,
            )
        # RuntimeError is how PyTorch says that memory does not suffice.
        except (ValueError, OSError, RuntimeError) as error:
            failures[name] = one_line(error).removeprefix(f'{name}: ')
            continue
        results[name] = result
        written.add(path)
        if result.areas:
            metric.results.append(tuple(result.areas))
    return LargeResults(results, failures, measure_areas(metric))


def expand(inputs: Sequence[str]) -> list[str]:
    """Files for directories and patterns; other names stay as they are.

    Raises:
        ValueError: A directory or a pattern stands for nothing.
    """
    names: list[str] = []
    for name in inputs:
        path = Path(name)
        found = [name]
        if path.is_dir():
            found = sorted(
                str(file)
                for file in path.iterdir()
                if file.suffix.lower() in SUFFIXES
                and not file.name.startswith('.')
            )
            found = _without_results(found)
            if not found:
                raise ValueError(
                    f'{name}: has no file that ends in {" ".join(SUFFIXES)}'
                )
        elif any(mark in name for mark in '*?[') and not path.exists():
            root = Path(path.anchor)
            pattern = str(path.relative_to(root)) if path.anchor else name
            found = sorted(
                str(file)
                for file in root.glob(pattern)
                if file.is_file() and not file.name.startswith('.')
            )
            if not found:
                raise ValueError(f'{name}: matches no file')
        names += found
    return names


def _without_results(names: list[str]) -> list[str]:
    """Leave out what earlier runs wrote of other files of a directory."""
    stems = {Path(name).stem for name in names}
    return [
        name
        for name in names
        if not any(
            Path(name).stem == f'{stem}_{kind}'
            for stem in stems
            for kind in ('mask', 'probs', 'centrality', 'overview', 'tissue')
        )
    ]


@contextmanager
def _ranking(network: Network, wanted: bool) -> Iterator[None]:
    """Have the last attention gather what the importance of tokens needs.

    Raises:
        ValueError: There is no attention.
    """
    if not wanted:
        yield
        return
    attention = [s for s in network.steps() if isinstance(s, GlobalBranch)]
    if not attention:
        raise ValueError('--centrality: the model has no attention')
    last: Any = attention[-1].op
    before = getattr(last, 'with_importance', None)
    if before is None:  # it is known there anyway
        yield
        return
    last.with_importance = True
    try:
        yield
    finally:
        last.with_importance = before


def _cast(model: BaseModel, dtype: torch.dtype) -> BaseModel:
    """The model in a dtype; a copy if it is another."""
    if next(model.backbone.parameters()).dtype != dtype:
        model = copy.deepcopy(model)
        for part in model.children():
            # Not the mean of the pixels, which would be off by a fraction.
            if part is not model.data_preprocessor:
                part.to(dtype)
    return model
