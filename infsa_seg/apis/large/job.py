# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One large image from its file to its results."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from mmengine.model import BaseModel
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
from infsa_seg.execution import (
    Grid,
    ImportanceSink,
    Journal,
    Layout,
    Plan,
    RamStore,
    Streaming,
    TokenStore,
    format_bytes,
    make_plan,
    matmul_rate,
    parse_bytes,
    read_token_mask,
    resident_bytes,
)
from infsa_seg.layers.protocol import BandNetwork, Network
from infsa_seg.ops import Rows
from infsa_seg.raster import Window

from .manifest import describe_run
from .options import DTYPES, LargeOptions
from .outputs import Outputs, Task
from .paths import paths_of
from .raster_image import RasterImage, rows_at_once, valid_window
from .sources import Source, naming, stem_of


@dataclasses.dataclass(frozen=True)
class LargeResult:
    """What became of a large image.

    Attributes:
        written (tuple[Path]): The files, the mask or the label first.
        plan (Plan | None): What was foreseen; None where no pixel is valid.
        seconds (float): What it took.
        difference (float | None): Largest difference between the logits of
            both runs, with ``verify``.
        areas (list[Tensor]): Pixels of intersection, union, prediction and
            label by class, where labels are known.
        summary (dict): Share of valid pixels, and of each class among them;
            or the best classes with their scores. Values that were seen, and
            blocks that could not be read.
        notes (tuple[str]): What people should know about it.
    """

    written: tuple[Path, ...]
    plan: Plan | None
    seconds: float
    difference: float | None
    areas: list[Tensor]
    summary: dict[str, Any]
    notes: tuple[str, ...]


class LargeJob(abc.ABC):
    """One image on its way.

    Args:
        model (BaseModel): In evaluation mode.
        source (Source): The image.
        out (str | Path): See :func:`paths_of`.
        options (LargeOptions): How.
    """

    # Of the first file.
    kind: ClassVar[str]

    def __init__(
        self,
        model: BaseModel,
        source: Source,
        out: str | Path,
        options: LargeOptions,
    ) -> None:
        self.source, self.name, self.options = source, source.name, options
        self.model = model
        self.reader = reader = source.reader
        self.network = self.network_of(model)
        self.device = next(self.model.parameters()).device
        self.dtype = DTYPES[options.dtype]
        self.store_dtype = DTYPES[options.store_dtype or options.dtype]
        meta = reader.meta
        found = valid_window(reader)
        self.is_blank = found is None
        window = found or Window(0, 0, meta.height, meta.width)
        with naming(self.name):
            self.image = RasterImage(
                reader, model, window, options.channels, options.stretch
            )
        self.grid = Grid(window.height, window.width, self.network.patch_size)
        self.notes = [*source.notes, *self.image.notes]
        self.stem = stem_of(model, self.name)
        self.paths = paths_of(out, self.stem, options, self.kind)
        run = describe_run(model, self.name, options)
        self.outputs = self._make_outputs(
            Task(self.paths, source, options, run, self.image, self.grid)
        )
        first = self.paths[self.kind]
        self.folder = Path(options.scratch or first.parent) / (
            f'.{first.stem}.scratch'
        )
        self.token_mask = None
        if not (self.is_blank or meta.all_valid):
            pixel = meta.channels * meta.dtype.itemsize
            rows = rows_at_once(meta.width * self.grid.patch_size * pixel)
            self.token_mask = read_token_mask(self.image, self.grid, rows)
        self.chunk_tokens = 512 if self.device.type == 'cpu' else 2**16
        self.plan = None if self.is_blank else self._plan()

    @classmethod
    def options_of(
        cls, model: BaseModel, options: LargeOptions
    ) -> LargeOptions:
        """What the options come to for a model.

        Raises:
            ValueError: One of them does not go with it.
        """
        return options

    @staticmethod
    @abc.abstractmethod
    def network_of(model: BaseModel) -> Network:
        """What runs in bands.

        Raises:
            ValueError: The model cannot.
        """

    @abc.abstractmethod
    def _make_outputs(self, task: Task) -> Outputs:
        """What writes the files."""

    @abc.abstractmethod
    def _compute(
        self, streaming: Streaming, importance: ImportanceSink | None
    ) -> None:
        """Run all bands, for the files."""

    @abc.abstractmethod
    def _compute_again(self, streaming: Streaming) -> float:
        """Run other bands; the largest difference of the logits."""

    def run(
        self,
        on_plan: Callable[[str], None] | None,
        on_note: Callable[[str], None] | None = None,
    ) -> LargeResult:
        """Compute the files; see :func:`infer_large_image`."""
        on_note = on_note or (lambda note: None)
        start = time.perf_counter()
        for note in self.notes:
            on_note(note)
        with ExitStack() as stack:
            self.outputs.open(stack)
            apart = None
            if not self.is_blank:
                self._check_space()
                if on_plan is not None:
                    on_plan(self.describe())
                with self._progress() as on_band:
                    self._stream(on_band)
                    apart = self._verify(on_band)
            self.outputs.finish()
        for note in self._doubts():
            self.notes.append(note)
            on_note(note)
        return self._result(start, apart)

    def _doubts(self) -> list[str]:
        """What looks wrong about the result."""
        bad_blocks = self.outputs.summary()['bad_blocks']
        if not bad_blocks:
            return []
        return [f'{len(bad_blocks)} areas could not be read and are not valid']

    @property
    def _is_verified(self) -> bool:
        return self.options.verify is not None and not self.is_blank

    def describe(self) -> str:
        """The plan in lines for people."""
        meta = self.reader.meta
        size = f'{self.name}: {meta.height} x {meta.width} pixels'
        if meta.mpp is not None and self.source.is_slide:
            size += f' of {meta.mpp[0]:.4g} um'
        if self.is_blank:
            return f'{size}, none of them valid: nothing to compute'
        plan = self._known_plan
        rate = matmul_rate(self.device, self.dtype)
        twice = 2 if self._is_verified else 1
        tissue = self.source.tissue
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
        if tissue is not None:
            lines.insert(2, f'tissue   {tissue.mean():.1%} of the pixels')
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
            valid=self.token_mask,
            ranked=options.centrality,
        )

    @property
    def _other_band_rows(self) -> int:
        """The height of bands for a second run; lower, to fit as well."""
        rows = self._known_plan.band_rows
        return max(rows * 2 // 3, 1) if rows > 1 else 2

    @property
    def _can_resume(self) -> bool:
        return self.options.resume and self.folder.exists()

    def _check_space(self) -> None:
        """Find out before the model starts, not after hours."""
        first = self.paths[self.kind]
        places = [(first.parent, self.outputs.disk_bytes)]
        if self._known_plan.store == 'disk' and not self._can_resume:
            places.append((self.folder.parent, self._known_plan.scratch_bytes))
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
                self._known_plan.band_rows, journal, on_band
            )
            importance = None
            if self.options.centrality:
                importance = self._scaled_importance(streaming)
            self._compute(streaming, importance)
        finally:
            if journal is not None:
                journal.end()

    def _verify(self, on_band: Callable[[], None]) -> float | None:
        """Run again with other bands; the largest difference of the logits."""
        if not self._is_verified:
            return None
        folder = self.folder.with_name(f'{self.folder.name}.verify')
        journal = None
        if self._known_plan.store == 'disk':
            journal = Journal(folder, {})
            journal.begin(anew=True)
        try:
            return self._compute_again(
                self._streaming(self._other_band_rows, journal, on_band)
            )
        finally:
            if journal is not None:
                journal.end()

    def _streaming(
        self,
        band_rows: int,
        journal: Journal | None,
        on_band: Callable[[], None],
    ) -> Streaming:
        layout = Layout(*self.grid.shape, self.token_mask)

        def store(name: str, width: int) -> TokenStore:
            if journal is None:
                return RamStore(layout, width, self.store_dtype)
            return journal.store(name, layout, width, self.store_dtype)

        taps = None
        if isinstance(self.network, BandNetwork):
            taps = store('taps', self.network.tap_dims)
        return Streaming(
            self.network,
            self.image,
            store('tokens', self.network.embed_dims),
            taps,
            band_rows,
            self.device,
            self.dtype,
            self.chunk_tokens,
            on_band,
            journal,
        )

    def _scaled_importance(self, streaming: Streaming) -> ImportanceSink:
        valid, count = self.token_mask, streaming.layout.num_valid

        def sink(rows: Rows, values: Tensor) -> None:
            values = values.cpu() * count
            if valid is not None:
                values[~valid[slice(*rows)]] = torch.nan
            self.outputs.sink_importance(rows.start, values)

        return sink

    def _identity(self) -> dict[str, str]:
        """What two runs must share for one to go on from the other."""
        source = self.name
        path = Path(self.name)
        if path.is_file():
            stat = path.stat()
            source = f'{path.resolve()} {stat.st_size} {stat.st_mtime_ns}'
        options = self.options
        return {
            'model': self.outputs.run['model']['weights_blake2b'],
            'image': source,
            'dtype': f'{self.dtype} {self.store_dtype}',
            'set of output files': ' '.join(self.paths),
            'version of infsa_seg': infsa_seg.__version__,
            'nodata or window': f'{options.nodata} {self.image.window}',
            'channels': f'{options.channels} {options.stretch}',
            'resolution or tissue': f'{self.grid} {self._digest_of_mask()}',
            'reader': f'{options.reader} {options.tolerate_damage}',
            'verify': f'{options.verify}',
        }

    def _digest_of_mask(self) -> str:
        """Which tokens are valid, and which pixels by tissue."""
        digest = hashlib.blake2b(digest_size=16)
        if self.token_mask is not None:
            digest.update(self.token_mask.numpy().tobytes())
        if self.source.tissue is not None:
            digest.update(self.source.tissue.tobytes())
        return digest.hexdigest()

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """A bar over the bands of all sweeps, where somebody watches."""
        plan = self._known_plan
        sweeps = [plan.num_bands] * plan.num_sweeps
        if self._is_verified:
            again = -(-plan.rows // self._other_band_rows)
            sweeps += [again] * plan.num_sweeps
        ends = list(itertools.accumulate(sweeps))
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
            task = bar.add_task('', total=ends[-1])

            def on_band() -> None:
                done = int(bar.tasks[0].completed) + 1
                sweep = min(bisect.bisect_left(ends, done) + 1, len(ends))
                name = Path(self.name).name
                title = f'{name}, sweep {sweep} of {len(ends)}'
                bar.update(task, advance=1, description=title)

            yield on_band

    def _result(self, start: float, apart: float | None) -> LargeResult:
        return LargeResult(
            tuple(self.paths.values()),
            self.plan,
            time.perf_counter() - start,
            apart,
            self.outputs.areas,
            self.outputs.summary(),
            tuple(self.notes),
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes} min'
    return f'{minutes} min {seconds} s' if minutes else f'{seconds} s'
