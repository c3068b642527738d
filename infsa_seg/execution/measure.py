# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What bands take: the executor, run on tensors without numbers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from infsa_seg.layers.protocol import BandNetwork, Network
from infsa_seg.ops import Rows

from .bands import Grid
from .layout import Layout
from .resize import Piece
from .streaming import Streaming
from .sweeps import Sweep, split_sweeps
from .token_store import TokenStore

# Distance of invalid tokens where there may be any.
_EVERY = 1024


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
    network: Network,
    grid: Grid,
    channels: int,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int = 512,
    masked: bool = False,
    ranked: bool = False,
) -> Cost:
    """Run bands of two heights through the executor without any numbers.

    Images of one width are measured once, as many as there may be.

    Args:
        network, grid, channels, dtype, chunk_tokens, masked, ranked: as for
            :func:`make_plan`.
    """
    key = (
        *(_describe(value) for value in vars(network).values()),
        *(grid.width, channels, dtype, chunk_tokens, masked, ranked),
        # In this mode torch takes other ways.
        torch.are_deterministic_algorithms_enabled(),
    )
    if key not in _costs:
        _costs[key] = _measure(
            network, grid, channels, dtype, chunk_tokens, masked, ranked
        )
    return _costs[key]


_costs: dict[tuple[Any, ...], Cost] = {}


def _measure(
    network: Network,
    grid: Grid,
    channels: int,
    dtype: torch.dtype,
    chunk_tokens: int,
    masked: bool,
    ranked: bool,
) -> Cost:
    shadow = _on_meta(network)
    heights = (1, 3)
    how = (channels, dtype, chunk_tokens, masked, ranked)
    measured = [
        _measure_bands(shadow, grid.width, rows, *how) for rows in heights
    ]
    (low, low_flops), (high, high_flops) = measured
    num_sweeps = len(split_sweeps(network.steps()))
    if isinstance(network, BandNetwork):
        num_sweeps += 1
    return Cost(num_sweeps, heights, (low, high), (low_flops, high_flops))


def _measure_bands(
    network: Network,
    width: int,
    band_rows: int,
    channels: int,
    dtype: torch.dtype,
    chunk_tokens: int,
    masked: bool,
    ranked: bool,
) -> tuple[list[int], float]:
    """Bytes per sweep, and operations of a band that has neighbours."""
    image = _NoImage(3 * band_rows * network.patch_size, width, channels)
    grid = Grid(image.height, width, network.patch_size)
    valid = None
    if masked:
        valid = torch.ones(grid.rows, grid.columns, dtype=torch.bool)
        # Between valid ones, for the ends would be cut off.
        valid[:, 1 : grid.columns - 1 : _EVERY] = False
    tracker = Tracker(_weights(network))
    layout = Layout(*grid.shape, valid)
    taps = None
    if isinstance(network, BandNetwork):
        taps = _NoStore(layout, network.tap_dims, dtype)
    streaming = Streaming(
        network,
        image,
        _NoStore(layout, network.embed_dims, dtype),
        taps,
        band_rows,
        torch.device('meta'),
        dtype,
        chunk_tokens,
        on_band=lambda: tracker.mark(),
    )

    def sink(rows: Rows, pieces: Iterator[Piece]) -> None:
        for _ in pieces:
            pass

    # Equal layers are measured once.
    streaming.sweeps, times = _without_repeats(streaming.sweeps)
    importance = (lambda rows, values: None) if ranked else None
    with tracker:
        if isinstance(network, BandNetwork):
            streaming.run(sink, importance)
            times = [*times, 1]
        else:
            streaming.classify(importance)
    num_bands = len(streaming.bands)
    sweeps = [
        tracker.marks[i : i + num_bands]
        for i in range(0, len(tracker.marks), num_bands)
    ]
    flops = sum(
        many * mark.flops
        for many, marks in zip(times, sweeps, strict=True)
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


def _describe(part: Any) -> Any:
    """What two parts of networks of equal cost have in common."""
    if isinstance(part, (int, Fraction)):
        return part
    if not isinstance(part, torch.nn.Module):
        return type(part)
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
        for module in part.modules()
    )


class _Mark(NamedTuple):
    """What was used since the mark before."""

    peak: int
    flops: int


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes of tensors that are alive.

    Args:
        known: tensors that are not to be counted, nor are views of them.

    Attributes:
        marks: the most bytes, and operations of matrix products and
            convolutions, since the mark before.
        alive: bytes now.
        peak: the most bytes since the last mark.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[_Mark] = []
        self._flops = 0
        self.alive = 0
        self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def mark(self) -> None:
        """Begin anew."""
        self.marks.append(_Mark(self.peak, self._flops))
        self.peak, self._flops = self.alive, 0

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
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self.alive -= nbytes


class _NoImage:
    """An image without numbers."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.height, self.width, self.channels = height, width, channels

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        shape = (1, self.channels, rows.num_rows, columns.num_rows)
        return torch.empty(shape, device='meta')

    def read_valid(self, rows: Rows, columns: Rows) -> Tensor | None:
        return None


class _NoStore(TokenStore):
    """A store without numbers."""

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        shape = (1, rows.num_rows, columns.num_rows, self.width)
        return torch.empty(shape, dtype=self.dtype, device='meta')

    def write(self, rows: Rows, columns: Rows, x: Tensor) -> None:
        pass

    def _view(self, first: int, count: int, writing: bool) -> Tensor:
        raise AssertionError('nothing is kept')

    def flip(self) -> None:
        pass

    def close(self) -> None:
        pass


def _on_meta(network: Network) -> Network:
    """A copy without numbers; the weights are not copied for it."""
    memo: dict[int, Any] = {}
    for tensor in _weights(network):
        empty = torch.empty_like(tensor, device='meta')
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    return copy.deepcopy(network, memo)


def _weights(network: Network) -> Iterator[Tensor]:
    """Parameters and buffers of the modules that a network is made of."""
    for value in vars(network).values():
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
            yield from value.buffers()
