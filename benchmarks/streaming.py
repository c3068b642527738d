# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Memory and time of whole images of any size, each in a process of its own.

``python benchmarks/streaming.py ARCH:VARIANT:SIZE:STORE:MEMORY ...`` segments
an empty raster of SIZE x SIZE pixels with random weights and 19 classes. It
prints the most memory that the process took, beside what was foreseen, and
how the time compares with that of the network's matrix products alone at the
rate that they have on this machine. Where an arch and a variant come in
several sizes the exponent of the time is fitted too. It fails where a process
took more than it was allowed.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infsa_seg.apis import infer_large_image, init_model
from infsa_seg.apis.progress import progress
from infsa_seg.execution import format_bytes, matmul_rate, parse_bytes

CONFIG = Path(__file__).parents[1] / 'configs' / 'infvit_seg_4k.py'
NUM_CLASSES = 19
DEFAULT = [
    'l4:linear:9216:ram:4GiB',
    'l4:neumann:9216:ram:4GiB',
    'l4:linear:9216:disk:2GiB',
    'tiny:neumann:2304:ram:4GiB',
    'tiny:neumann:4608:ram:4GiB',
    'tiny:neumann:9216:ram:4GiB',
    'tiny:neumann:8192:disk:3GiB',
    'tiny:neumann:32768:disk:3GiB',
]


class Case(NamedTuple):
    """One measurement."""

    arch: str
    variant: str
    size: int
    store: str
    memory: str

    @classmethod
    def parse(cls, text):
        try:
            arch, variant, size, store, memory = text.split(':')
            return cls(arch, variant, int(size), store, memory)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f'{text!r} is not ARCH:VARIANT:SIZE:STORE:MEMORY'
            ) from None


def build(case, ffn):
    backbone = dict(
        arch=case.arch,
        ffn=ffn,
        attn_cfg=dict(variant=case.variant),
        out_indices=-1,
        drop_path_rate=0.0,
    )
    model = init_model(
        CONFIG,
        cfg_options={
            **{f'model.backbone.{k}': v for k, v in backbone.items()},
            'model.decode_head.num_classes': NUM_CLASSES,
            'model.decode_head.in_channels': [WIDTHS[case.arch]],
            'model.decode_head.in_index': [0],
        },
    )
    model.dataset_meta = dict(
        classes=[f'class {index}' for index in range(NUM_CLASSES)],
        palette=[[10 * index] * 3 for index in range(NUM_CLASSES)],
    )
    return model


WIDTHS = {'tiny': 192, 'small': 384, 'base': 768, 'l4': 1024, 'large': 1024}


def measure(case, ffn, dtype, folder):
    """What a case took, as a dictionary."""
    model = build(case, ffn)
    source = Path(folder) / f'{case.size}.npy'
    if not source.exists():
        # Without contents, so that it takes no space.
        np.lib.format.open_memmap(
            source, 'w+', np.uint8, (case.size, case.size, 3)
        )
    rates = [matmul_rate(torch.device('cpu'), torch.float32, 1)]
    lines = []
    result = infer_large_image(
        model,
        source,
        Path(folder) / 'out.tif',
        lines.append,
        max_memory=case.memory,
        store=case.store,
        dtype=dtype,
        overwrite=True,
    )
    rates.append(matmul_rate(torch.device('cpu'), torch.float32, 1))
    return dict(
        planned=result.plan.peak_bytes,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=result.seconds,
        flops=result.plan.flops,
        products=result.plan.flops / (sum(rates) / len(rates)),
        band_rows=result.plan.band_rows,
    )


def in_process(case, args, folder):
    command = [sys.executable, __file__, ':'.join(map(str, case))]
    options = ['--ffn', args.ffn, '--dtype', args.dtype]
    done = subprocess.run(
        [*command, *options, '--folder', folder],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def fit(sizes, seconds):
    """Exponent of the time in the number of pixels."""
    x = [2 * math.log(size) for size in sizes]
    y = [math.log(value) for value in seconds]
    return np.polyfit(x, y, 1)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'cases',
        nargs='*',
        type=Case.parse,
        metavar='ARCH:VARIANT:SIZE:STORE:MEMORY',
        help=f'defaults to {" ".join(DEFAULT)}',
    )
    parser.add_argument('--ffn', choices=('mlp', 'dwconv'), default='mlp')
    parser.add_argument('--dtype', default='fp32')
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = args.cases or [Case.parse(text) for text in DEFAULT]
    if args.folder:
        print(json.dumps(measure(cases[0], args.ffn, args.dtype, args.folder)))
        return 0

    header = [
        *('arch', 'variant', 'pixels', 'store', 'allowed', 'foreseen'),
        *('peak', 'seconds', 'products / time', 'token rows'),
    ]
    for row in (header, ['---'] * len(header)):
        print(f'| {" | ".join(row)} |')
    too_much = False
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in progress(cases, 'Measuring'):
            found = in_process(case, args, folder)
            too_much |= found['peak'] > parse_bytes(case.memory)
            key = (case.arch, case.variant, case.store)
            times.setdefault(key, {})[case.size] = found['seconds']
            cells = [
                *(case.arch, case.variant, f'{case.size}²', case.store),
                *(case.memory, format_bytes(found['planned'])),
                *(format_bytes(found['peak']), f'{found["seconds"]:.0f}'),
                f'{found["products"] / found["seconds"]:.2f}',
                str(found['band_rows']),
            ]
            print(f'| {" | ".join(cells)} |', flush=True)
    for (arch, variant, store), by_size in times.items():
        if len(by_size) > 2:
            exponent = fit(by_size.keys(), by_size.values())
            print(
                f'time of {arch} {variant} {store} grows with pixels to the '
                f'power of {exponent:.2f}'
            )
    if too_much:
        print('a process took more than it was allowed', file=sys.stderr)
    return int(too_much)


if __name__ == '__main__':
    sys.exit(main())
