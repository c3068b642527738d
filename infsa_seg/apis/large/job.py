# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One large image from its file to its class map."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
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
from infsa_seg.execution import (
    Grid,
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
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import Rows
from infsa_seg.raster import Window

from .manifest import describe_run
from .options import DTYPES, LargeOptions
from .outputs import Outputs, difference
from .paths import paths_of
from .raster_image import RasterImage, rows_at_once, valid_window
from .sources import Source, naming, open_labels, stem_of


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
        summary (dict): Share of valid pixels, of each class among them,
            values that were seen, and blocks that could not be read.
        notes (tuple[str]): What people should know about it.
    """

    written: tuple[Path, ...]
    plan: Plan | None
    seconds: float
    difference: float | None
    areas: list[Tensor]
    summary: dict[str, Any]
    notes: tuple[str, ...]


class LargeJob:
    """One image on its way."""

    def __init__(
        self,
        model: BaseSegmentor,
        source: Source,
        out: str | Path,
        options: LargeOptions,
    ) -> None:
        self.source, self.name, self.options = source, source.name, options
        self.model = model
        self.reader = reader = source.reader
        self.network = SegmentorNetwork(self.model)
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
        stem = stem_of(model, self.name)
        self.paths = paths_of(out, stem, options)
        self.labels = open_labels(options.labels, stem, source)
        self.strip = self._choose_strip()
        self.outputs = self._make_outputs()
        self.folder = Path(options.scratch or self.paths['mask'].parent) / (
            f'.{self.paths["mask"].stem}.scratch'
        )
        self.token_mask = None
        if not (self.is_blank or meta.all_valid):
            pixel = meta.channels * meta.dtype.itemsize
            rows = rows_at_once(meta.width * self.grid.patch_size * pixel)
            self.token_mask = read_token_mask(self.image, self.grid, rows)
        self.chunk_tokens = 512 if self.device.type == 'cpu' else 2**16
        self.plan = None if self.is_blank else self._plan()

    def run(
        self,
        on_plan: Callable[[str], None] | None,
        on_note: Callable[[str], None] | None = None,
    ) -> LargeResult:
        """Segment the image; see :func:`infer_large_image`."""
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
        summary, notes = self.outputs.summary(), []
        if summary['one_class'] is not None:
            notes.append(
                f'all of it is {summary["one_class"]!r}; are the channels and '
                'the values those that the model was trained on?'
            )
        if summary['bad_blocks']:
            notes.append(
                f'{len(summary["bad_blocks"])} areas could not be read and '
                'are not valid'
            )
        return notes

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
        twice = 2 if self.strip else 1
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
            self.source,
            self.options,
            describe_run(self.model, self.name, self.options),
            self.image,
            self.grid,
            self.network.num_classes,
            classes,
            palette,
            getattr(head, 'threshold', None) or 0.5,
            self.labels,
            self.strip,
        )

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
            streaming.run(self.outputs.sink, importance)
        finally:
            if journal is not None:
                journal.end()

    def _verify(self, on_band: Callable[[], None]) -> float | None:
        """Run again with other bands; the largest difference of the logits."""
        if self.strip is None:
            return None
        first, self.outputs.kept = self.outputs.kept, []
        folder = self.folder.with_name(f'{self.folder.name}.verify')
        journal = None
        if self._known_plan.store == 'disk':
            journal = Journal(folder, {})
            journal.begin(anew=True)
        try:
            streaming = self._streaming(
                self._other_band_rows, journal, on_band
            )
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
        on_band: Callable[[], None],
    ) -> Streaming:
        layout = Layout(*self.grid.shape, self.token_mask)

        def store(name: str, width: int) -> TokenStore:
            if journal is None:
                return RamStore(layout, width, self.store_dtype)
            return journal.store(name, layout, width, self.store_dtype)

        return Streaming(
            self.network,
            self.image,
            store('tokens', self.network.embed_dims),
            store('taps', self.network.tap_dims),
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
        valid, count = self.token_mask, streaming.layout.num_valid

        def sink(rows: Rows, values: Tensor) -> None:
            values = values.cpu() * count
            if valid is not None:
                values[~valid[slice(*rows)]] = torch.nan
            self.outputs.sink_importance(rows, values)

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
        if self.strip is not None:
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
