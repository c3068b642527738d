# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Memory, time and traffic of training steps, each case in new processes.

``python benchmarks/training.py ARCH:SIZE:RANKS:RECOMPUTE ...`` trains on one
drawn image of SIZE x SIZE pixels, shared by RANKS processes (a spatial
group); RECOMPUTE is ``yes`` or ``no``. Every step prints its loss and
seconds. At the end come the peak memory of each process, what of it was
activations, and what a rank sent, beside the formula and what Ulysses and
ring attention would have moved in the same layers. Where an arch comes in
several sizes the growth of its activations is fitted too.

The activations of a process are its peak less what it holds between steps:
interpreter, image, weights, gradients and the two moments of AdamW.
"""

import argparse
import ctypes
import datetime
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from infsa_seg.apis import init_model
from infsa_seg.execution import (
    Grid,
    SpatialParallel,
    communication,
    format_bytes,
)
from infsa_seg.models.segmentors import spatial_loss
from infsa_seg.models.utils import SegmentorNetwork

CONFIG = Path(__file__).parents[1] / 'configs' / 'infvit_seg_4k.py'
WIDTHS = {'tiny': 192, 'small': 384, 'base': 768, 'l4': 1024, 'large': 1024}
# Side of a region of one class, in pixels.
REGION = 128
HOUR = datetime.timedelta(hours=1)


class Case(NamedTuple):
    """One measurement."""

    arch: str
    size: int
    ranks: int
    recompute: bool

    @classmethod
    def parse(cls, text):
        try:
            arch, size, ranks, recompute = text.split(':')
            recompute = {'yes': True, 'no': False}[recompute]
            return cls(arch, int(size), int(ranks), recompute)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(
                f'{text!r} is not ARCH:SIZE:RANKS:yes|no'
            ) from None

    def __str__(self):
        recompute = 'yes' if self.recompute else 'no'
        return f'{self.arch}:{self.size}:{self.ranks}:{recompute}'


def build(case, args):
    options = {
        'backbone.arch': case.arch,
        'backbone.ffn': args.ffn,
        'backbone.attn_cfg': dict(variant=args.variant),
        'backbone.out_indices': -1,
        'backbone.with_cp': case.recompute,
        'decode_head.num_classes': args.classes,
        'decode_head.in_channels': [WIDTHS[case.arch]],
        'decode_head.in_index': [0],
        'decode_head.channels': args.head_channels,
        'decode_head.loss_decode': dict(type='BandCrossEntropyLoss'),
    }
    torch.manual_seed(0)
    logging.disable(logging.INFO)
    model = init_model(
        CONFIG, cfg_options={f'model.{k}': v for k, v in options.items()}
    )
    model.init_weights()
    return model.train()


def draw(size, rows, classes):
    """Some rows of the image, (1, 3, rows, size), and of its labels.

    Every class has a colour. Each row of regions has noise of its own, so
    that a band shows what the whole image shows there.
    """
    random = np.random.default_rng(0)
    side = -(-size // REGION)
    regions = random.integers(classes, size=(side, side))
    colours = random.normal(size=(classes, 3)).astype(np.float32)
    label = np.empty((rows.stop - rows.start, size), np.uint8)
    pixels = np.empty((1, 3, *label.shape), np.float32)
    for index in range(rows.start // REGION, -(-rows.stop // REGION)):
        start = max(rows.start, index * REGION)
        stop = min(rows.stop, index * REGION + REGION)
        here = slice(start - rows.start, stop - rows.start)
        line = regions[index].repeat(REGION)[:size]
        label[here] = line
        noise = np.random.default_rng(index).normal(
            scale=0.5, size=(3, REGION, size)
        )
        drawn = colours[line].T[:, None] + noise
        pixels[0, :, here] = drawn[
            :, start - index * REGION : stop - index * REGION
        ]
    return torch.from_numpy(pixels), torch.from_numpy(label)[None].long()


class Traffic:
    """Bytes that each layer sends in a forward pass."""

    def __init__(self, parallel, layers):
        self.parallel = parallel
        self.merges, self.halos = [], []
        self.before = None
        for layer in layers:
            layer.attn.register_forward_pre_hook(self._begin)
            layer.ffn.register_forward_hook(self._end)

    def _now(self):
        traffic = self.parallel.traffic
        return traffic.merges.bytes, traffic.halos.bytes

    def _begin(self, module, args):
        self.before = self._now()

    def _end(self, module, args, output):
        now = self._now()
        self.merges.append(now[0] - self.before[0])
        self.halos.append(now[1] - self.before[1])


def work(case, args, rank, folder):
    """What one process of a case does; a dictionary of what it found."""
    torch.set_num_threads(args.threads)
    dist.init_process_group(
        'gloo',
        init_method=f'file://{folder}/store',
        rank=rank,
        world_size=case.ranks,
        timeout=HOUR,
    )
    parallel = SpatialParallel()
    model = build(case, args)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    grid = Grid(case.size, case.size, model.backbone.patch_size)
    rows = grid.pixel_rows(parallel.rows(grid.rows))
    pixels, label = draw(case.size, rows, args.classes)

    def step(pixels, label, height):
        parallel.share_random_state(torch.device('cpu'))
        optimizer.zero_grad(set_to_none=False)
        losses = spatial_loss(model, pixels, label, height, parallel)
        loss = losses['loss_ce']
        loss.backward()
        total = loss.detach().clone()
        if case.ranks > 1:
            dist.all_reduce(total)
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        return total.item()

    # Gradients and moments come into being before anything is measured.
    height = model.backbone.patch_size
    small = slice(0, height), slice(0, height)
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    step(
        pixels[(..., *small)].clone(),
        label[(..., *small)].clone(),
        height * case.ranks,
    )
    for group in optimizer.param_groups:
        group['lr'] = args.lr
    ctypes.CDLL(None).malloc_trim(0)
    held, before = status('VmRSS'), status('VmHWM')
    # From here on the kernel begins the peak anew.
    Path('/proc/self/clear_refs').write_text('5')
    sent = Traffic(parallel, model.backbone.layers)
    losses, seconds = [], []
    for number in range(args.steps):
        parallel.traffic.reset()
        sent.merges.clear()
        sent.halos.clear()
        start = time.monotonic()
        losses.append(step(pixels, label, case.size))
        seconds.append(time.monotonic() - start)
        if rank == 0:
            print(
                f'step {number + 1}: loss {losses[-1]:.4f}, '
                f'{seconds[-1]:.1f} s, '
                f'peak so far {format_bytes(max(before, status("VmHWM")))}',
                flush=True,
            )
    network = SegmentorNetwork(model)
    sizes = case.size, case.size, case.ranks, rank
    said = communication(network, *sizes, recompute=case.recompute)
    # One more forward pass is what recomputation adds.
    once, twice = (
        communication(network, *sizes, recompute=r) for r in (False, True)
    )
    layers = len(model.backbone.layers)
    weights = sum(p.numel() for p in parameters)
    dist.destroy_process_group()
    return dict(
        losses=losses,
        seconds=seconds,
        held=held,
        peak=max(before, status('VmHWM')),
        active=status('VmHWM') - held,
        weights=weights,
        merges=parallel.traffic.merges.bytes,
        halos=parallel.traffic.halos.bytes,
        layer_merges=sent.merges[0],
        layer_halos=sent.halos[0],
        said_merges=4 * said.merges,
        said_halos=4 * said.halos,
        ulysses=4 * said.ulysses,
        ring=4 * said.ring,
        said_layer_merges=4 * (twice.merges - once.merges) // layers,
        said_layer_halos=4 * (twice.halos - once.halos) // layers,
        layer_ulysses=4 * (twice.ulysses - once.ulysses) // layers,
        layer_ring=4 * (twice.ring - once.ring) // layers,
    )


def status(name):
    """Bytes of this process by the kernel's name for them."""
    text = Path('/proc/self/status').read_text()
    (line,) = [x for x in text.splitlines() if x.startswith(f'{name}:')]
    return int(line.split()[1]) * 1024


def in_processes(case, args):
    """Run a case; what each of its processes found."""
    options = []
    for name in ('steps', 'classes', 'variant', 'ffn', 'threads', 'lr'):
        options += [f'--{name}', str(getattr(args, name))]
    options += ['--head-channels', str(args.head_channels)]
    # The allocator gives back what is freed, so that peaks are of what was
    # in use.
    env = {'MALLOC_MMAP_THRESHOLD_': str(2**20), **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, str(case), *options),
                    *('--rank', str(rank), '--folder', folder),
                ],
                env=env,
            )
            for rank in range(case.ranks)
        ]
        try:
            while any(p.poll() is None for p in processes):
                if any(p.poll() for p in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
        if any(p.wait() for p in processes):
            sys.exit(f'{case}: a process failed')
        return [
            json.loads(Path(folder, f'{rank}.json').read_text())
            for rank in range(case.ranks)
        ]


def report(case, args, found):
    """Print what a case took."""
    peaks = [one['peak'] for one in found]
    active = [one['active'] for one in found]
    first = found[0]
    print(
        f'{first["weights"] / 1e6:.1f} million weights; with gradients and '
        f'moments {format_bytes(16 * first["weights"])} in float32'
    )
    for rank, one in enumerate(found):
        print(
            f'rank {rank}: peak {format_bytes(one["peak"])}, held between '
            f'steps {format_bytes(one["held"])}, activations '
            f'{format_bytes(active[rank])}'
        )
    # One in the middle has two neighbours.
    middle = found[case.ranks // 2]
    if case.ranks > 1:
        print_traffic(middle)
    cells = [
        *(case.arch, args.variant, f'{case.size}²', case.ranks),
        'yes' if case.recompute else 'no',
        f'{first["losses"][0]:.3f} to {first["losses"][-1]:.3f}',
        f'{sum(first["seconds"]) / len(first["seconds"]):.1f}',
        *(format_bytes(max(peaks)), format_bytes(max(active))),
    ]
    print(f'| {" | ".join(map(str, cells))} |', flush=True)


def print_traffic(rank):
    """What one rank sent: numbers that were counted, and by formula."""

    def mega(*names):
        return [f'{rank[name] / 1e6:.3f}' for name in names]

    rows = [
        [
            *('sent, million bytes', 'merges', 'by formula', 'halos'),
            *('by formula', 'Ulysses', 'ring attention'),
        ],
        ['---'] * 7,
        [
            'a layer, forward',
            *mega('layer_merges', 'said_layer_merges'),
            *mega('layer_halos', 'said_layer_halos'),
            *mega('layer_ulysses', 'layer_ring'),
        ],
        [
            'a step',
            *mega('merges', 'said_merges', 'halos', 'said_halos'),
            *mega('ulysses', 'ring'),
        ],
    ]
    for row in rows:
        print(f'| {" | ".join(row)} |')


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'cases',
        nargs='+',
        type=Case.parse,
        metavar='ARCH:SIZE:RANKS:RECOMPUTE',
    )
    parser.add_argument('--steps', type=int, default=1)
    parser.add_argument('--classes', type=int, default=19)
    parser.add_argument(
        '--variant', choices=('neumann', 'linear'), default='neumann'
    )
    parser.add_argument('--ffn', choices=('mlp', 'dwconv'), default='dwconv')
    parser.add_argument('--head-channels', type=int, default=64)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--lr', type=float, default=3e-4)
    parser.add_argument('--rank', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        (case,) = args.cases
        found = work(case, args, args.rank, args.folder)
        Path(args.folder, f'{args.rank}.json').write_text(json.dumps(found))
        return
    active = {}
    for case in args.cases:
        print(f'{case} {args.variant} {args.ffn}', flush=True)
        found = in_processes(case, args)
        report(case, args, found)
        key = (case.arch, case.ranks, case.recompute)
        active.setdefault(key, {})[case.size] = max(
            one['active'] for one in found
        )
    for (arch, ranks, recompute), by_size in active.items():
        if len(by_size) > 2:
            x = [2 * math.log(size) for size in by_size]
            y = [math.log(value) for value in by_size.values()]
            power = np.polyfit(x, y, 1)[0]
            how = 'with' if recompute else 'without'
            print(
                f'activations of {arch} on {ranks}, {how} recomputation, '
                f'grow with pixels to the power of {power:.2f}'
            )


if __name__ == '__main__':
    main()
