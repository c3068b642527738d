# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a streaming run will take, known before it starts."""

from __future__ import annotations

import dataclasses
import os
import re
import time

import torch
from torch import Tensor

from infsa_seg.layers.protocol import BandNetwork, Network

from .bands import Grid
from .layout import Layout
from .measure import measure

_UNITS = {'B': 1, 'KB': 1e3, 'MB': 1e6, 'GB': 1e9, 'TB': 1e12} | {
    'KIB': 2**10,
    'MIB': 2**20,
    'GIB': 2**30,
    'TIB': 2**40,
}
# Taller bands do not pay: less than a tenth of the work is then done twice.
_MIN_BAND_ROWS, _MAX_BAND_ROWS = 8, 32
_MAX_BAND_TOKENS = 2**14
# Libraries lay out and reorder what they work on; the allocator keeps some of
# what it was given back.
_SLACK = 1.3
_OVERHEAD = 160 * 2**20


def parse_bytes(text: str | int) -> int:
    """A number of bytes, such as ``'4GiB'`` or ``'500MB'``.

    Raises:
        ValueError: it is none, or not positive.
    """
    number = r'\d+(?:\.\d+)?'
    match = re.fullmatch(rf'\s*({number})\s*([A-Za-z]*)\s*', str(text))
    unit = _UNITS.get(match[2].upper() or 'B', 0) if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if size < 1:
        raise ValueError(
            f'{text!r} is no amount of memory; write one such as 4GiB or 500MB'
        )
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
        store_bytes: one copy of all tokens and taps that are stored.
        scratch_bytes: on disk while it runs.
        flops: floating-point operations, of valid tokens for the most part.
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
    network: Network,
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
    valid: Tensor | None = None,
    ranked: bool = False,
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
        valid: bool (rows, columns) of its valid tokens; None for all.
        ranked: whether the importance of tokens is asked for.

    Returns:
        The plan.

    Raises:
        ValueError: nothing fits.
    """
    cost = measure(
        *(network, grid, channels, dtype, chunk_tokens),
        *(valid is not None, ranked),
    )
    width = network.embed_dims
    if isinstance(network, BandNetwork):
        width += network.tap_dims
    tokens = grid.rows * grid.columns
    fixed = resident_bytes + _OVERHEAD + tokens
    stored = Layout(*grid.shape, valid).num_stored
    store_bytes = stored * width * store_dtype.itemsize

    def peak(rows: int, kept: int) -> int:
        return int(
            fixed + kept + rows * row_bytes + _SLACK * cost.peak_bytes(rows)
        )

    # Of a wide image lower ones: memory should not grow with the width.
    limit = max(_MAX_BAND_TOKENS // grid.columns, _MIN_BAND_ROWS)
    limit = min(limit, _MAX_BAND_ROWS, grid.rows)
    candidates = [band_rows] if band_rows else range(limit, 0, -1)
    places = ('ram', 'disk') if store == 'auto' else (store,)
    for place in places:
        kept = store_bytes if place == 'ram' else 0
        for rows in candidates:
            # Bands of a row or two would do most of the work twice, or more.
            if (
                store == 'auto'
                and place == 'ram'
                and rows < min(limit, _MIN_BAND_ROWS)
            ):
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
                    cost.flops(rows, grid.rows) * stored / tokens,
                )
    least = peak(band_rows or 1, store_bytes if store == 'ram' else 0)
    advice = ' or --store disk' if store == 'ram' else ''
    raise ValueError(
        f'{grid.height}x{grid.width} pixels need {format_bytes(least)} of '
        f'memory at least, more than the {format_bytes(max_bytes)} allowed; '
        f'use a larger --max-memory{advice}'
    )


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
