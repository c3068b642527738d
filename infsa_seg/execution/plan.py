# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a streaming run will take, known before it starts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from infsa_seg.layers.protocol import BandNetwork
from infsa_seg.ops import Rows

from .bands import Grid
from .resize import Piece
from .streaming import Streaming
from .sweeps import Sweep, split_sweeps
from .token_store import TokenStore

_UNITS = {'B': 1, 'KB': 1e3, 'MB': 1e6, 'GB': 1e9, 'TB': 1e12} | {
    'KIB': 2**10,
    'MIB': 2**20,
    'GIB': 2**30,
    'TIB': 2**40,
}
# Taller bands do not pay: less than a tenth of the work is then done twice.
_MAX_BAND_ROWS = 32
# Libraries lay out and reorder what they work on; the allocator keeps some of
# what it was given back.
_SLACK = 1.3
_OVERHEAD = 160 * 2**20


def parse_bytes(text: str | int) -> int:
    """A number of bytes, such as ``'4GiB'`` or ``'500MB'``.

    Raises:
        ValueError: it is none, or not positive.
    """
    match = re.fullmatch(r'\s*([\d.]+)\s*([A-Za-z]*)\s*', str(text))
    unit = match and _UNITS.get(match[2].upper() or 'B')
    try:
        assert match and unit
        size = int(float(match[1]) * unit)
        assert size > 0
    except (AssertionError, ValueError):
        raise ValueError(
            f'{text!r} is no amount of memory; write one such as 4GiB or 500MB'
        ) from None
    return size


def format_bytes(size: float) -> str:
    """A number of bytes for people."""
    for unit in ('B', 'KiB', 'MiB'):
        if size < 1024:
            return (
                f'{size:.0f} {unit}' if unit == 'B' else f'{size:.1f} {unit}'
            )
        size /= 1024
    return f'{size:.2f} GiB'


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will do and take.

    Attributes:
        rows, columns: the grid of tokens.
        band_rows: token rows of a band.
        num_sweeps: passes over the tokens, decoding included.
        store: 'ram' or 'disk'.
        peak_bytes: memory of the process at most, weights included.
        store_bytes: one copy of all tokens and taps.
        scratch_bytes: on disk while it runs.
        flops: floating-point operations.
    """

    rows: int
    columns: int
    band_rows: int
    num_sweeps: int
    store: str
    peak_bytes: int
    store_bytes: int
    scratch_bytes: int
    flops: float

    @property
    def num_bands(self) -> int:
        """Bands of a sweep."""
        return -(-self.rows // self.band_rows)

    def seconds(self, flops_per_second: float) -> float:
        """A rough estimate: a third of the time goes to other things."""
        return 1.5 * self.flops / flops_per_second


def make_plan(
    network: BandNetwork,
    grid: Grid,
    channels: int,
    *,
    max_bytes: int,
    resident_bytes: int,
    row_bytes: int = 0,
    store: str = 'auto',
    dtype: torch.dtype = torch.float32,
    store_dtype: torch.dtype = torch.float32,
    band_rows: int | None = None,
    chunk_tokens: int = 512,
    masked: bool = False,
) -> Plan:
    """Choose store and band height so that the run fits into memory.

    Args:
        network: its weights are not read, so that they may be on the meta
            device.
        grid: the image.
        channels: of its pixels.
        max_bytes: what the process may take.
        resident_bytes: what it takes already, or will whatever the bands.
        row_bytes: what reader and writer hold per token row of a band.
        store: 'ram', 'disk', or 'auto': memory if there is enough.
        dtype, store_dtype: of the computation, and of the stored tokens.
        band_rows: token rows of a band; None chooses.
        chunk_tokens: as for :class:`Streaming`.
        masked: whether some pixels are not valid.

    Returns:
        The plan.

    Raises:
        ValueError: nothing fits.
    """
    cost = measure(network, grid, channels, dtype, chunk_tokens, masked)
    width = network.embed_dims + network.tap_dims
    tokens = grid.rows * grid.columns
    store_bytes = tokens * width * store_dtype.itemsize
    fixed = resident_bytes + _OVERHEAD + tokens

    def peak(rows: int, kept: int) -> int:
        return int(
            fixed + kept + rows * row_bytes + _SLACK * cost.peak_bytes(rows)
        )

    limit = min(_MAX_BAND_ROWS, grid.rows)
    candidates = [band_rows] if band_rows else range(limit, 0, -1)
    places = ('ram', 'disk') if store == 'auto' else (store,)
    for place in places:
        kept = store_bytes if place == 'ram' else 0
        for rows in candidates:
            # Bands of a row or two would do most of the work twice, or more.
            if store == 'auto' and place == 'ram' and rows < min(limit, 8):
                break
            if peak(rows, kept) <= max_bytes:
                return Plan(
                    grid.rows,
                    grid.columns,
                    rows,
                    cost.num_sweeps,
                    place,
                    peak(rows, kept),
                    store_bytes,
                    2 * store_bytes if place == 'disk' else 0,
                    cost.flops(rows, grid.rows),
                )
    least = peak(band_rows or 1, store_bytes if store == 'ram' else 0)
    advice = ' or --store disk' if store == 'ram' else ''
    raise ValueError(
        f'{grid.height}x{grid.width} pixels need {format_bytes(least)} of '
        f'memory at least, more than the {format_bytes(max_bytes)} allowed; '
        f'use a larger --max-memory{advice}'
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What bands take, measured at two heights and linear in between.

    Attributes:
        num_sweeps: passes over the tokens, decoding included.
        heights: the two heights, in token rows.
        sweep_bytes: per height, the most bytes alive in each kind of sweep.
        band_flops: per height, operations of one band through all sweeps.
    """

    num_sweeps: int
    heights: tuple[int, int]
    sweep_bytes: tuple[list[int], list[int]]
    band_flops: tuple[float, float]

    def peak_bytes(self, band_rows: int) -> float:
        """Bytes of the band at work, at most."""
        return max(
            self._line(low, high, band_rows)
            for low, high in zip(*self.sweep_bytes, strict=True)
        )

    def flops(self, band_rows: int, total_rows: int) -> float:
        """Operations of the whole image."""
        per_band = self._line(*self.band_flops, band_rows)
        return per_band * total_rows / band_rows

    def _line(self, low: float, high: float, rows: int) -> float:
        first, second = self.heights
        slope = (high - low) / (second - first)
        return max(low, low + slope * (rows - first))


def measure(
    network: BandNetwork,
    grid: Grid,
    channels: int,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int = 512,
    masked: bool = False,
) -> Cost:
    """Run bands of two heights through the executor without any numbers.

    Args:
        network, grid, channels, dtype, chunk_tokens, masked: as for
            :func:`make_plan`.
    """
    shadow = _on_meta(network)
    heights = (1, 3)
    measured = [
        _measure_bands(
            shadow, grid.width, rows, channels, dtype, chunk_tokens, masked
        )
        for rows in heights
    ]
    (low, low_flops), (high, high_flops) = measured
    num_sweeps = len(split_sweeps(network.steps())) + 1
    return Cost(num_sweeps, heights, (low, high), (low_flops, high_flops))


def _measure_bands(
    network: BandNetwork,
    width: int,
    band_rows: int,
    channels: int,
    dtype: torch.dtype,
    chunk_tokens: int,
    masked: bool,
) -> tuple[list[int], float]:
    """Bytes per sweep, and operations of a band that has neighbours."""
    image = _NoImage(3 * band_rows * network.patch_size, width, channels)
    grid = Grid(image.height, width, network.patch_size)
    valid = None
    if masked:
        valid = torch.ones(grid.rows, grid.columns, dtype=torch.bool)
        valid[:, 0] = False
    tracker = _Tracker(_weights(network))
    shape = (grid.rows, grid.columns)
    streaming = Streaming(
        network,
        image,
        valid,
        _NoStore(*shape, network.embed_dims, dtype),
        _NoStore(*shape, network.tap_dims, dtype),
        band_rows,
        torch.device('meta'),
        dtype,
        chunk_tokens,
        on_band=lambda: tracker.mark(),
    )

    def sink(rows: Rows, pieces: Iterator[Piece]) -> None:
        for _ in pieces:
            pass

    # Equal layers are measured once; a last number is for decoding.
    streaming.sweeps, times = _without_repeats(streaming.sweeps)
    with tracker:
        streaming.run(sink)
    num_bands = len(streaming.bands)
    sweeps = [
        tracker.marks[i : i + num_bands]
        for i in range(0, len(tracker.marks), num_bands)
    ]
    flops = sum(
        many * mark.flops
        for many, marks in zip([*times, 1], sweeps, strict=True)
        for mark in marks
    )
    peaks = [max(mark.peak for mark in marks) for marks in sweeps]
    return peaks, flops / num_bands


def _without_repeats(sweeps: list[Sweep]) -> tuple[list[Sweep], list[int]]:
    """Leave out layers like earlier ones; how often each sweep was there."""
    layers: dict[tuple[Any, ...], list[Sweep]] = {}
    times: dict[tuple[Any, ...], int] = {}
    for _, group in itertools.groupby(sweeps, lambda s: id(s.gather)):
        layer = list(group)
        key = tuple(
            (sweep.embeds, sweep.phase, *map(_describe, sweep.steps))
            for sweep in layer
        )
        key += (_describe(layer[0].gather),)
        layers.setdefault(key, layer)
        times[key] = times.get(key, 0) + 1
    kept = [sweep for layer in layers.values() for sweep in layer]
    return kept, [n for key, n in times.items() for _ in layers[key]]


def _describe(step: Any) -> Any:
    """What two steps of equal cost have in common."""
    if not isinstance(step, torch.nn.Module):
        return type(step)
    return tuple(
        (
            type(module),
            *(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, (bool, int, float, str))
            ),
            *(parameter.shape for parameter in module.parameters()),
        )
        for module in step.modules()
    )


class _Mark(NamedTuple):
    """What was used since the mark before."""

    peak: int
    flops: int


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes of tensors that are alive.

    Args:
        known: tensors that are not to be counted, nor are views of them.

    Attributes:
        marks: the most bytes, and operations of matrix products and
            convolutions, since the mark before.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[_Mark] = []
        self._flops = 0
        self._alive = 0
        self._peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def mark(self) -> None:
        """Begin anew."""
        self.marks.append(_Mark(self._peak, self._flops))
        self._peak, self._flops = self._alive, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._flops += count(*args, **kwargs, out_val=result)
        many = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in many:
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        self._alive += storage.nbytes()
        self._peak = max(self._peak, self._alive)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self._alive -= nbytes


class _NoImage:
    """An image without numbers."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels

    def read(self, rows: Rows) -> Tensor:
        shape = (1, self.channels, rows.num_rows, self.width)
        return torch.empty(shape, device='meta')

    def read_valid(self, rows: Rows) -> Tensor | None:
        return None


class _NoStore(TokenStore):
    """A store without numbers."""

    def read(self, rows: Rows) -> Tensor:
        shape = (1, rows.num_rows, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device='meta')

    def write(self, rows: Rows, x: Tensor) -> None:
        pass

    def flip(self) -> None:
        pass

    def close(self) -> None:
        pass


def _on_meta(network: BandNetwork) -> BandNetwork:
    """A copy without numbers; the weights are not copied for it."""
    memo: dict[int, Any] = {}
    for tensor in _weights(network):
        empty = torch.empty_like(tensor, device='meta')
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    return copy.deepcopy(network, memo)


def _weights(network: BandNetwork) -> Iterator[Tensor]:
    """Parameters and buffers of the modules that a network is made of."""
    for value in vars(network).values():
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
            yield from value.buffers()


def resident_bytes() -> int:
    """Memory that the process takes now."""
    try:
        with open('/proc/self/statm') as file:
            pages = int(file.read().split()[1])
        return pages * os.sysconf('SC_PAGE_SIZE')
    except OSError:
        # What is known elsewhere is the most that it took so far.
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if os.uname().sysname == 'Darwin' else 1024 * peak


def matmul_rate(
    device: torch.device, dtype: torch.dtype, seconds: float = 0.2
) -> float:
    """Floating-point operations per second of matrix products here."""
    a, b = (
        torch.ones(shape, device=device, dtype=dtype)
        for shape in ((512, 1024), (1024, 2048))
    )
    flops, start = 0.0, time.perf_counter()
    while True:
        (a @ b).sum().item()
        flops += 2 * 512 * 1024 * 2048
        spent = time.perf_counter() - start
        if spent > seconds:
            return flops / spent
