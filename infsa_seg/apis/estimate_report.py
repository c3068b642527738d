# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""An estimate of training as text, and what to do where it does not fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infsa_seg.execution import Activations, format_bytes, parse_bytes

from .estimate import Estimate, estimate_memory

# What a GPU keeps for its context, NCCL and the gaps of the allocator.
RESERVE = '2GiB'
# Spatial groups beyond this are not tried.
_MOST_RANKS = 64


def smallest_spatial(
    found: Estimate, room: float, **kwargs: Any
) -> Estimate | None:
    """The smallest spatial group with which a rank fits a device.

    Args:
        found (Estimate): One that does not fit; its job is kept as it is, but
            has as many ranks as a spatial group at least.
        room (float): Bytes that a rank may take.
        **kwargs: Of :func:`estimate_memory`, with which it was found.

    Returns:
        Estimate | None: None where no group of up to 64 ranks will do.
    """
    world = found.dims.world_size
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    while 2 * sizes[-1] <= _MOST_RANKS:
        sizes.append(2 * sizes[-1])
    for size in sizes:
        if size <= found.dims.spatial:
            continue
        if _lower_bound(found, size) > room:
            continue
        kwargs['world_size'] = max(world, size)
        kwargs['spatial_parallel_size'] = size
        try:
            other = estimate_memory(**kwargs)
        except ValueError:
            return None
        if other.peak_bytes <= room:
            return other
    return None


def _lower_bound(found: Estimate, size: int) -> float:
    """Bytes that a larger group cannot do without."""
    share = found.activations.peak * found.dims.spatial / size
    few = replace(found, activations=Activations(0, int(0.9 * share)))
    return few.backward_bytes


def describe_estimate(
    found: Estimate,
    devices: Sequence[str | int],
    reserve: str | int = RESERVE,
    **kwargs: Any,
) -> list[str]:
    """An estimate as lines of text.

    Args:
        found (Estimate): What to describe.
        devices (Sequence[str | int]): Memory of the devices in question, as
            ``'40GiB'`` or in bytes.
        reserve (str | int): What of it is not to be had.
        **kwargs: Of :func:`estimate_memory`; to look for a spatial group
            that fits where this one does not.

    Raises:
        ValueError: One of them is no amount of memory.
    """
    dims, shares = found.dims, found.shares
    height, width = found.crop
    lines = [
        f'{found.config}: {found.num_weights / 1e6:.1f} million weights, '
        f'{found.precision}',
        f'{dims.world_size} ranks, {dims.spatial} to an image; '
        f'{found.batch_size} x {height} x {width} pixels; ZeRO stage '
        f'{found.zero_stage}; activations '
        + ('recomputed' if found.recompute else 'kept'),
        '',
    ]
    sizes = {
        'weights': shares.weights,
        'gathered weights of others': shares.gathered,
        'gradients': shares.gradients,
        'optimizer': shares.optimizer,
        'buffers of ZeRO': shares.buffers,
        'activations, at most': found.activations.peak,
        'of them kept for the backward pass': found.activations.kept,
        'peak before the update': found.backward_bytes,
        'peak during the update': shares.update,
    }
    lines += _table(
        ['memory per rank', 'bytes'],
        [[name, format_bytes(size)] for name, size in sizes.items()],
    )
    lines += ['', *_table(*_sent(found)), '']
    for device in devices:
        room = parse_bytes(device) - parse_bytes(reserve)
        free = room - found.peak_bytes
        place = f'{device}, {reserve} of it reserved'
        if free >= 0:
            lines.append(f'{place}: fits, {format_bytes(free)} to spare')
            continue
        lines.append(f'{place}: {format_bytes(-free)} too much')
        other = kwargs and smallest_spatial(found, room, **kwargs)
        if other:
            lines.append(
                f'  --spatial-parallel-size {other.dims.spatial} fits, with '
                f'{format_bytes(other.peak_bytes)} per rank of '
                f'{other.dims.world_size}'
            )
        elif kwargs:
            lines.append('  no larger spatial group was found that fits')
    return lines


def _sent(found: Estimate) -> tuple[list[str], list[list[str]]]:
    """What a rank sends in a step."""
    sizes = {'gradients and weights': found.shares.sent}
    if found.traffic is not None:
        sent = found.traffic
        width = 4 if found.precision == 'fp32' else 2
        sizes |= {
            'states of attention': 4 * (sent.sent - sent.halos),
            'halo rows': width * sent.halos,
            'instead, Ulysses would send': width * sent.ulysses,
            'instead, ring attention': width * sent.ring,
        }
    return (
        ['sent per rank and step', 'bytes'],
        [[name, format_bytes(size)] for name, size in sizes.items()],
    )


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [
        max(len(row[column]) for row in (header, *rows)) for column in (0, 1)
    ]
    return [
        f'{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}'
        for row in (header, *rows)
    ]
