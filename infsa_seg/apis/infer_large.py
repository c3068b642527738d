# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Class maps of images of any size, in the memory that the user sets."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmseg.evaluation import IoUMetric
from mmseg.models import BaseSegmentor
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

import infsa_seg
from infsa_seg.datasets import SceneReader
from infsa_seg.execution import (
    FileStore,
    Grid,
    Journal,
    Plan,
    RamStore,
    Streaming,
    format_bytes,
    make_plan,
    matmul_rate,
    parse_bytes,
    read_token_mask,
    resident_bytes,
)
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import Rows
from infsa_seg.raster import RasterReader, Window, open_raster

from .errors import one_line
from .infer import measure_areas, parse_scene
from .inference import init_model
from .outputs import PROBS, Outputs, difference, paths_of
from .pictures import Palette
from .raster_image import RasterImage, valid_window

DTYPES = {
    'fp32': torch.float32,
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
}
STORES = ('auto', 'ram', 'disk')
# For the arguments of the tool.
large_choices = {
    'store': STORES,
    'dtype': tuple(DTYPES),
    'probs': tuple(PROBS),
}
# What a folder is searched for.
SUFFIXES = ('.tif', '.tiff', '.png', '.jpg', '.jpeg', '.bmp', '.webp', '.npy')


@dataclasses.dataclass(frozen=True)
class LargeOptions:
    """How a large image is segmented.

    Attributes:
        max_memory (str | int): What the process may take, such as ``'4GiB'``,
            weights included.
        store (str): Where tokens wait between sweeps: 'ram', 'disk', or
            'auto', memory if there is enough.
        scratch (str | Path, optional): Directory for tokens on disk. A
            directory of each image's own is made in it, and removed at the
            end. Defaults to that of the mask.
        dtype (str): Of the computation, 'fp32', 'bf16' or 'fp16'.
        store_dtype (str, optional): Of the tokens between sweeps; defaults to
            ``dtype``.
        band_rows (int, optional): Token rows of a band. Defaults to what fits
            into memory.
        probs (str, optional): Write class probabilities too, 'uint8' (255 is
            certain) or 'float16'.
        centrality (bool): Write how much each token receives from all others
            in the last attention, 1 being the average.
        overview (bool): Write a PNG of the image under its classes.
        palette (sequence, optional): One (red, green, blue) per class, in
            place of the model's.
        labels (str | Path, optional): Directory with the true class indices,
            NAME.png or NAME.tif.
        verify (int, optional): Run again with other bands, and compare the
            logits of so many rows of pixels in the middle.
        overwrite (bool): Replace files that exist.
        resume (bool): Go on from what a killed run left on disk.

    Raises:
        ValueError: A value is none of these.
    """

    max_memory: str | int = '4GiB'
    store: str = 'auto'
    scratch: str | Path | None = None
    dtype: str = 'fp32'
    store_dtype: str | None = None
    band_rows: int | None = None
    probs: str | None = None
    centrality: bool = False
    overview: bool = False
    palette: Palette | None = None
    labels: str | Path | None = None
    verify: int | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.max_memory)
        for name, known in (
            ('store', STORES),
            ('dtype', tuple(DTYPES)),
            ('store_dtype', (None, *DTYPES)),
            ('probs', (None, *PROBS)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f'{name}={value!r} is unknown; use one of {known}'
                )
        for name in ('band_rows', 'verify'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}={value}: give 1 or more')


@dataclasses.dataclass(frozen=True)
class LargeResult:
    """What became of a large image.

    Attributes:
        written (tuple[Path]): The files, the mask first.
        plan (Plan | None): What was foreseen; None where no pixel is valid.
        seconds (float): What it took.
        difference (float | None): Largest difference between the logits of
            both runs, with ``verify``.
        areas (list[Tensor]): Pixels of intersection, union, prediction and
            label by class, where labels are known.
    """

    written: tuple[Path, ...]
    plan: Plan | None
    seconds: float
    difference: float | None
    areas: list[Tensor]


def infer_large_image(
    model: BaseSegmentor,
    source: str | Path | RasterReader,
    out: str | Path,
    on_plan: Callable[[str], None] | None = None,
    **options: Any,
) -> LargeResult:
    """Segment an image of any size as a whole, in bands.

    The classes are those of one forward pass over the whole image, whatever
    the memory, the store and the bands. Pixels that the raster marks as not
    valid have no influence and get the nodata value of the mask.

    Args:
        model (BaseSegmentor): From :func:`infsa_seg.apis.init_model`. It is
            left as it is.
        source (str | Path | RasterReader): A raster, or ``scene:SIZE`` where
            the model's config tests on scenes.
        out (str | Path): A directory for ``NAME_mask.tif``, or the file of
            the mask. Others lie beside it.
        on_plan (callable, optional): Called with the lines of
            :func:`describe` before the start.
        **options: See :class:`LargeOptions`.

    Returns:
        LargeResult: The files and what was measured.

    Raises:
        OSError: The image cannot be read, a file exists or cannot be written,
            or the disk has not enough space.
        ValueError: The model cannot run in bands, does not fit the image, or
            the memory does not suffice. No file is left behind.
    """
    with _open(model, source) as (name, reader):
        job = _Job(model, name, reader, out, LargeOptions(**options))
        return job.run(on_plan)


def plan_large_image(
    model: BaseSegmentor,
    source: str | Path | RasterReader,
    out: str | Path,
    **options: Any,
) -> str:
    """What :func:`infer_large_image` would take, in lines for people.

    The weights do not matter; nothing is written.
    """
    with _open(model, source) as (name, reader):
        job = _Job(model, name, reader, out, LargeOptions(**options))
        return job.describe()


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
    **options: Any,
) -> LargeResults:
    """Segment every input; go on where one fails.

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
        **options: See :class:`LargeOptions`.

    Raises:
        OSError: The config or the checkpoint is not there.
        ValueError: One of them, or an option, is not usable.
    """
    settings = LargeOptions(**options)
    names = expand(inputs)
    if len(names) > 1 and Path(out).suffix.lower() in ('.tif', '.tiff'):
        raise ValueError(
            f'{out}: is one file for {len(names)} inputs; give a directory'
        )
    model = init_model(
        config,
        None if plan else checkpoint,
        device or get_device(),
        cfg_options,
    )
    SegmentorNetwork(model)
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
            stem = _stem(model, name)
            path = paths_of(out, stem, None, False, False)['mask']
            if path in written:
                raise ValueError(f'{path} is the result of another input')
            result = infer_large_image(model, name, out, say, **options)
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


class _Job:
    """One image on its way."""

    def __init__(
        self,
        model: BaseSegmentor,
        name: str,
        reader: RasterReader,
        out: str | Path,
        options: LargeOptions,
    ) -> None:
        self.name, self.reader, self.options = name, reader, options
        self.model = _cast(model, DTYPES[options.dtype])
        self.network = SegmentorNetwork(self.model)
        self.device = next(self.model.parameters()).device
        self.dtype = DTYPES[options.dtype]
        self.store_dtype = DTYPES[options.store_dtype or options.dtype]
        meta = reader.meta
        found = valid_window(reader)
        self.is_blank = found is None
        window = found or Window(0, 0, meta.height, meta.width)
        self.image = RasterImage(reader, self.model, window)
        self.grid = Grid(window.height, window.width, self.network.patch_size)
        stem = _stem(model, name)
        self.paths = paths_of(
            out, stem, options.probs, options.centrality, options.overview
        )
        self.labels = self._open_labels(stem)
        self.strip = self._choose_strip()
        self.outputs = self._make_outputs()
        self.folder = Path(options.scratch or self.paths['mask'].parent) / (
            f'.{self.paths["mask"].stem}.scratch'
        )
        self.chunk_tokens = 512 if self.device.type == 'cpu' else 2**16
        self.plan = None if self.is_blank else self._plan()

    def run(self, on_plan: Callable[[str], None] | None) -> LargeResult:
        """Segment the image; see :func:`infer_large_image`."""
        start = time.perf_counter()
        with ExitStack() as stack:
            self.outputs.open(stack, self.options.overwrite)
            if self.is_blank:
                self.outputs.fill_blank()
                return self._result(start, None)
            self._check_space()
            if on_plan is not None:
                on_plan(self.describe())
            with self._progress() as on_band:
                self._stream(on_band)
                apart = self._verify(on_band)
            self.outputs.finish()
        return self._result(start, apart)

    def describe(self) -> str:
        """The plan in lines for people."""
        meta = self.reader.meta
        size = f'{self.name}: {meta.height} x {meta.width} pixels'
        if self.is_blank:
            return f'{size}, none of them valid: nothing to compute'
        plan = self._known_plan
        rate = matmul_rate(self.device, self.dtype)
        twice = 2 if self.strip else 1
        lines = [
            size,
            f'tokens   {plan.rows * plan.columns:,} '
            f'({plan.rows} x {plan.columns})',
            f'sweeps   {plan.num_sweeps}, each of {plan.num_bands} bands of '
            f'{plan.band_rows} token rows',
            f'memory   {format_bytes(plan.peak_bytes)} at most, of '
            f'{format_bytes(parse_bytes(self.options.max_memory))} allowed; '
            f'tokens in {"memory" if plan.store == "ram" else "files"}',
            f'scratch  {format_bytes(plan.scratch_bytes)}',
            f'output   {format_bytes(self.outputs.disk_bytes)} before '
            'compression',
            f'time     about {_duration(twice * plan.seconds(rate))} at '
            f'{rate / 1e9:.0f} GFLOP/s',
        ]
        return '\n  '.join(lines)

    @property
    def _known_plan(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def _plan(self) -> Plan:
        options, meta = self.options, self.reader.meta
        outputs = self.outputs
        return make_plan(
            self.network,
            self.grid,
            self.image.channels,
            max_bytes=parse_bytes(options.max_memory),
            resident_bytes=resident_bytes()
            + meta.nbytes_resident
            + outputs.resident_bytes,
            row_bytes=self.grid.patch_size * meta.width * outputs.pixel_bytes,
            store='disk' if self._can_resume else options.store,
            dtype=self.dtype,
            store_dtype=self.store_dtype,
            band_rows=options.band_rows,
            chunk_tokens=self.chunk_tokens,
            masked=not meta.all_valid,
        )

    @property
    def _can_resume(self) -> bool:
        return self.options.resume and self.folder.exists()

    def _make_outputs(self) -> Outputs:
        meta = self.model.dataset_meta
        head = self.model.decode_head
        palette = self.options.palette or meta['palette']
        classes = meta['classes']
        if len(palette) != len(classes):
            raise ValueError(
                f'the palette has {len(palette)} colours for {len(classes)} '
                'classes'
            )
        return Outputs(
            self.paths,
            self.image,
            self.grid,
            self.network.num_classes,
            classes,
            palette,
            getattr(head, 'threshold', None) or 0.5,
            self.options.probs,
            self.labels,
            self.strip,
        )

    def _open_labels(self, stem: str) -> Any:
        if isinstance(self.reader, SceneReader):
            return _LabelsOfScene(self.reader)
        if self.options.labels is None:
            return None
        folder = Path(self.options.labels)
        for suffix in ('.png', '.tif', '.tiff'):
            if (folder / f'{stem}{suffix}').exists():
                labels = open_raster(folder / f'{stem}{suffix}')
                break
        else:
            raise ValueError(f'{folder}: has neither {stem}.png nor .tif')
        size, meta = labels.meta, self.reader.meta
        if (size.height, size.width) != (meta.height, meta.width):
            raise ValueError(
                f'{folder}: {stem} has {size.height}x{size.width} labels for '
                f'{meta.height}x{meta.width} pixels'
            )
        return labels

    def _choose_strip(self) -> Rows | None:
        if self.options.verify is None or self.is_blank:
            return None
        num_rows = min(self.options.verify, self.grid.height)
        first = (self.grid.height - num_rows) // 2
        return Rows(first, first + num_rows)

    def _check_space(self) -> None:
        """Find out before the model starts, not after hours."""
        places = [(self.paths['mask'].parent, self.outputs.disk_bytes)]
        if self._known_plan.store == 'disk' and not self._can_resume:
            twice = 2 if self.strip else 1
            places.append(
                (self.folder.parent, twice * self._known_plan.scratch_bytes)
            )
        needed: dict[int, int] = {}
        for folder, size in places:
            folder.mkdir(parents=True, exist_ok=True)
            device = folder.stat().st_dev
            needed[device] = needed.get(device, 0) + size
            free = shutil.disk_usage(folder).free
            if needed[device] > free:
                raise ValueError(
                    f'{folder}: {format_bytes(free)} are free, but up to '
                    f'{format_bytes(needed[device])} are needed'
                )

    def _stream(self, on_band: Callable[[], None]) -> None:
        journal = None
        if self._known_plan.store == 'disk':
            journal = Journal(self.folder, self._identity())
            if not (self._can_resume and journal.reopen()):
                journal.begin(anew=self.options.resume)
        try:
            streaming = self._streaming(
                self._known_plan.band_rows, journal, self.folder, on_band
            )
            importance = None
            if self.options.centrality:
                importance = self._scaled_importance(streaming)
            streaming.run(self.outputs.sink, importance)
        finally:
            if journal is not None:
                journal.end()

    def _verify(self, on_band: Callable[[], None]) -> float | None:
        """Run again with other bands; the largest difference of the logits."""
        if self.strip is None:
            return None
        first, self.outputs.kept = self.outputs.kept, []
        rows = max(self._known_plan.band_rows * 2 // 3, 1)
        if rows == self._known_plan.band_rows:
            rows = 2
        folder = self.folder.with_name(f'{self.folder.name}.verify')
        journal = None
        if self._known_plan.store == 'disk':
            journal = Journal(folder, {})
            journal.begin()
        try:
            streaming = self._streaming(rows, journal, folder, on_band)
            patch = self.grid.patch_size
            streaming.run(
                self.outputs.keep_only,
                wanted=Rows(
                    self.strip.start // patch, -(-self.strip.stop // patch)
                ),
            )
        finally:
            if journal is not None:
                journal.end()
        return difference(first, self.outputs.kept)

    def _streaming(
        self,
        band_rows: int,
        journal: Journal | None,
        folder: Path,
        on_band: Callable[[], None],
    ) -> Streaming:
        shape = (self.grid.rows, self.grid.columns)
        widths = {
            'tokens': self.network.embed_dims,
            'taps': self.network.tap_dims,
        }
        stores: dict[str, RamStore | FileStore] = {}
        for kind, width in widths.items():
            form = ((*shape, width), self.store_dtype)
            if journal is None:
                stores[kind] = RamStore(*form[0], form[1])
            else:
                stores[kind] = journal.store(kind, *form)
        return Streaming(
            self.network,
            self.image,
            read_token_mask(self.image, self.grid, band_rows),
            stores['tokens'],
            stores['taps'],
            band_rows,
            self.device,
            self.dtype,
            self.chunk_tokens,
            on_band,
            journal,
        )

    def _scaled_importance(
        self, streaming: Streaming
    ) -> Callable[[Rows, Tensor], None]:
        last = [
            module
            for module in self.model.backbone.modules()
            if hasattr(module, 'with_importance')
        ]
        if last:
            last[-1].with_importance = True
        valid = streaming.valid
        count = self.grid.rows * self.grid.columns
        if valid is not None:
            count = int(valid.sum())

        def sink(rows: Rows, values: Tensor) -> None:
            values = values * count
            if valid is not None:
                values[~valid[slice(*rows)]] = torch.nan
            self.outputs.sink_importance(rows, values)

        return sink

    def _identity(self) -> dict[str, str]:
        """What two runs must share for one to go on from the other."""
        digest = hashlib.blake2b(digest_size=16)
        for key, value in self.model.state_dict().items():
            digest.update(key.encode())
            array = value.detach().cpu().contiguous().flatten()
            digest.update(array.view(torch.uint8).numpy())
        source = self.name
        path = Path(self.name)
        if path.is_file():
            stat = path.stat()
            source = f'{path.resolve()} {stat.st_size} {stat.st_mtime_ns}'
        options = self.options
        return {
            'model': digest.hexdigest(),
            'image': source,
            'dtype': f'{self.dtype} {self.store_dtype}',
            'set of output files': ' '.join(self.paths),
            'version of infsa_seg': infsa_seg.__version__,
            'window': f'{self.image.window}',
            'verify': f'{options.verify}',
        }

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """A bar over the bands of all sweeps, where somebody watches."""
        total = self._known_plan.num_sweeps * self._known_plan.num_bands
        console = Console(stderr=True)
        with Progress(
            TextColumn('{task.description}'),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar:
            task = bar.add_task(Path(self.name).name, total=total)
            yield lambda: bar.advance(task)

    def _result(self, start: float, apart: float | None) -> LargeResult:
        return LargeResult(
            tuple(self.paths.values()),
            self.plan,
            time.perf_counter() - start,
            apart,
            self.outputs.areas,
        )


class _LabelsOfScene:
    """The labels of a scene, read like a raster."""

    def __init__(self, reader: SceneReader) -> None:
        self.reader = reader

    def read(self, window: Window) -> Any:
        return self.reader.read_labels(window)[..., None]


@contextmanager
def _open(
    model: BaseSegmentor, source: str | Path | RasterReader
) -> Iterator[tuple[str, RasterReader]]:
    """A name for the source, and a reader of it."""
    if isinstance(source, RasterReader):
        yield 'image', source
        return
    name = str(source)
    if name.startswith('scene:'):
        _, scene = parse_scene(name, model.cfg)
        yield name, SceneReader(scene)
        return
    with open_raster(name) as reader:
        yield name, reader


def _stem(model: BaseSegmentor, name: str) -> str:
    """What the files of an input are named after."""
    if name.startswith('scene:'):
        return parse_scene(name, model.cfg)[0]
    return Path(name).stem


def _cast(model: BaseSegmentor, dtype: torch.dtype) -> BaseSegmentor:
    """The model in a dtype; a copy if it is another."""
    if next(model.backbone.parameters()).dtype != dtype:
        model = copy.deepcopy(model)
        # Not the mean of the pixels, which would be off by a fraction.
        for part in (model.backbone, model.decode_head):
            part.to(dtype)
    return model


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes} min'
    return f'{minutes} min {seconds} s' if minutes else f'{seconds} s'
