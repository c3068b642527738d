# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Whole slides of which little is tissue, each in a process of its own.

    python benchmarks/slides.py --side 60000 --radius 1000 2000

A pyramid is written in which three spots of tissue lie on glass, and is
segmented with ``--tissue auto``. Printed are what was foreseen and the peak of
the memory, time per million pixels of tissue, and how often the time of the
first slide each takes, beside how often its tissue. The exit status is 1 if
the memory was exceeded.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
import tifffile
from streaming import Case, build

from infsa_seg.apis import infer_large_image
from infsa_seg.apis.cli import positive
from infsa_seg.apis.progress import progress
from infsa_seg.execution import format_bytes, parse_bytes

TILE = 512
# Of the side: centres of the spots, (row, column).
SPOTS = ((0.2, 0.15), (0.55, 0.8), (0.85, 0.4))
GLASS = (244, 243, 246)


def tiles(side, radius, scale):
    """JPEGs of the tiles of a level; those of glass are encoded once."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 18, (TILE, TILE, 3))
    glass = np.full((TILE, TILE, 3), GLASS, np.uint8)
    bare = encode(glass)
    length = side // scale
    here = np.arange(TILE)
    for row in range(0, length, TILE):
        for col in range(0, length, TILE):
            inside = np.zeros((TILE, TILE), bool)
            for down, across in SPOTS:
                y = scale * (row + here) - down * side
                x = scale * (col + here) - across * side
                inside |= y[:, None] ** 2 + x**2 < radius**2
            if not inside.any():
                yield bare
                continue
            pink = (np.array((190, 105, 165)) + noise).clip(0, 255)
            yield encode(np.where(inside[..., None], pink, glass))


def encode(pixels):
    """A tile as a JPEG; OpenCV takes blue first."""
    bgr = np.ascontiguousarray(pixels[..., ::-1], np.uint8)
    return cv2.imencode('.jpg', bgr)[1].tobytes()


def write_slide(path, side, radius):
    """A pyramid of 0.25 micrometres per pixel."""
    options = dict(
        dtype=np.uint8,
        tile=(TILE, TILE),
        photometric='ycbcr',
        subsampling=(2, 2),
        compression='jpeg',
        resolution=(4e4, 4e4),
        resolutionunit='CENTIMETER',
    )
    scales = [1, 4, 16]
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for scale in progress(scales, 'Writing'):
            writer.write(
                tiles(side, radius, scale),
                shape=(side // scale, side // scale, 3),
                subifds=len(scales) - 1 if scale == 1 else 0,
                subfiletype=int(scale > 1),
                **options,
            )


def measure(args):
    """What a slide took, as a dictionary."""
    (radius,) = args.radius
    path = Path(args.folder) / f'{radius}.tif'
    write_slide(path, args.side, radius)
    model = build(Case('tiny', 'neumann', args.side, 'disk', '3GiB'), 'mlp')
    result = infer_large_image(
        model,
        path,
        Path(args.folder) / f'{radius}_mask.tif',
        max_memory=args.max_memory,
        tissue='auto',
    )
    return dict(
        planned=result.plan.peak_bytes,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=result.seconds,
        tissue=result.summary['valid'] * args.side**2 / 1e6,
        store=result.plan.store,
    )


def in_process(radius, args, folder):
    """The same in a process of its own."""
    command = [sys.executable, __file__, '--radius', str(radius)]
    options = ['--side', str(args.side), '--max-memory', args.max_memory]
    done = subprocess.run(
        [*command, *options, '--folder', folder],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--side', type=positive, default=60000)
    parser.add_argument(
        '--radius', type=positive, nargs='+', default=[1000, 2000]
    )
    parser.add_argument('--max-memory', default='3GiB')
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(measure(args)))
        return 0
    header = [
        *('pixels', 'tissue (M pixels)', 'store', 'foreseen', 'peak'),
        *('seconds', 'per M pixels', 'tissue, times', 'time, times'),
    ]
    for row in (header, ['---'] * len(header)):
        print(f'| {" | ".join(row)} |')
    first, too_much = None, False
    for radius in progress(args.radius, 'Measuring'):
        with tempfile.TemporaryDirectory() as folder:
            found = in_process(radius, args, folder)
        first = first or found
        too_much |= found['peak'] > parse_bytes(args.max_memory)
        cells = [
            *(f'{args.side}²', f'{found["tissue"]:.1f}', found['store']),
            *(format_bytes(found['planned']), format_bytes(found['peak'])),
            f'{found["seconds"]:.0f}',
            f'{found["seconds"] / found["tissue"]:.2f}',
            f'{found["tissue"] / first["tissue"]:.2f}',
            f'{found["seconds"] / first["seconds"]:.2f}',
        ]
        print(f'| {" | ".join(cells)} |', flush=True)
    if too_much:
        print('a process took more than it was allowed', file=sys.stderr)
    return int(too_much)


if __name__ == '__main__':
    sys.exit(main())
