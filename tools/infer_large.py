# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Segment large images: ``python tools/infer_large.py CONFIG CHECKPOINT ...``.

Each image as a whole, without tiles, in the memory that --max-memory sets. A
classifier gives one label for each.
"""

import argparse
import sys
from argparse import ArgumentParser
from typing import Any

try:
    from infsa_seg.apis import cli, infer_large, large_choices
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'infer_large.py: error: {error}')


def colours(value: str) -> list[tuple[int, ...]]:
    """An argument such as ``ff0000,00ff00``: one colour per class."""
    try:
        palette = [tuple(bytes.fromhex(part)) for part in value.split(',')]
        if any(len(colour) != 3 for colour in palette):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{value!r} is no list of colours such as ff0000,00ff00'
        ) from None
    return palette


def numbers(value: str) -> list[int]:
    """An argument such as ``4,3,2``."""
    try:
        return [int(part) for part in value.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{value!r} is no list of channels such as 4,3,2'
        ) from None


def percentiles(value: str) -> tuple[float, ...]:
    """An argument such as ``2,98``."""
    try:
        return tuple(float(part) for part in value.split(','))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{value!r} is no pair of percentiles such as 2,98'
        ) from None


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = ArgumentParser(
        description='Segment or classify images of any size, each as a whole'
    )
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='trained weights')
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help='raster, directory, pattern, or scene:SIZE[:NUMBER] for a '
        'synthetic scene',
    )
    parser.add_argument(
        '--out',
        required=True,
        metavar='DIR_OR_FILE',
        help='directory for NAME_mask.tif, or the .tif of the mask; of a '
        'classifier NAME_label.json',
    )
    what = parser.add_argument_group('what to write')
    what.add_argument(
        '--probs',
        nargs='?',
        const='uint8',
        choices=large_choices['probs'],
        help='class probabilities too, NAME_probs.tif; 255 of uint8 is '
        'certain',
    )
    what.add_argument(
        '--centrality',
        action='store_true',
        help='how much each token receives in the last attention, '
        'NAME_centrality.tif; 1 is the average; a classifier does it anyway',
    )
    what.add_argument(
        '--areas',
        nargs='?',
        const='csv',
        choices=large_choices['areas'],
        help='a table of pixels and area per class, NAME_areas.csv',
    )
    what.add_argument(
        '--polygons',
        nargs='?',
        const='geojson',
        choices=large_choices['polygons'],
        help='the areas of each class as polygons, NAME_polygons.geojson; '
        'those of slides as QuPath reads them',
    )
    what.add_argument(
        '--min-area',
        type=float,
        default=0.0,
        metavar='AREA',
        help='polygons that are smaller are left out, and holes filled; in '
        'square metres, square micrometres of slides, or pixels',
    )
    what.add_argument(
        '--simplify',
        type=float,
        default=0.0,
        metavar='DISTANCE',
        help='by how much an outline may be moved to make it simpler, in the '
        'units of its coordinates',
    )
    what.add_argument(
        '--style',
        action='store_true',
        help='the classes for QGIS, which finds NAME_mask.qml by itself',
    )
    what.add_argument(
        '--manifest',
        action='store_true',
        help='what was computed from what, NAME_manifest.json',
    )
    what.add_argument(
        '--pyramid',
        action=argparse.BooleanOptionalAction,
        help='add overviews to the mask; that of a slide has them anyway',
    )
    what.add_argument(
        '--cog',
        action='store_true',
        help='make the mask a cloud-optimised GeoTIFF',
    )
    what.add_argument(
        '--overview',
        action='store_true',
        help='a picture of the image under its classes, NAME_overview.png',
    )
    what.add_argument(
        '--palette',
        type=colours,
        metavar='RRGGBB,...',
        help="a colour per class, in place of the model's",
    )
    what.add_argument(
        '--labels',
        metavar='DIR',
        help='directory with NAME.png or NAME.tif, true class indices, to '
        'measure against',
    )
    what.add_argument(
        '--overwrite', action='store_true', help='replace files that exist'
    )
    source = parser.add_argument_group('what to read')
    source.add_argument(
        '--res',
        metavar='SIZE',
        help='size of a pixel at which to segment, such as 0.5um or 30cm; '
        'that of the file by default',
    )
    source.add_argument(
        '--level',
        type=int,
        metavar='N',
        help='level of a pyramid to segment, in place of --res',
    )
    source.add_argument(
        '--mpp-override',
        type=float,
        metavar='UM',
        help='micrometres per pixel of the full resolution, in place of what '
        'the file says',
    )
    source.add_argument(
        '--tissue',
        metavar='auto|none|MASK',
        help='leave out the glass of a slide: auto finds tissue by its '
        'colour, MASK is a raster that is 0 on glass; saved as '
        'NAME_tissue.png',
    )
    source.add_argument(
        '--stretch',
        type=percentiles,
        metavar='LOW,HIGH',
        help='percentiles of the values of the image that become 0 and 255 '
        "before the model's own normalisation, such as 2,98",
    )
    source.add_argument(
        '--reader',
        choices=large_choices['reader'],
        default='auto',
        help='by what files are read; auto looks into them',
    )
    source.add_argument(
        '--tolerate-damage',
        action='store_true',
        help='leave out blocks that cannot be read, in place of giving up',
    )
    source.add_argument(
        '--channels',
        type=numbers,
        metavar='N,...',
        help='channels of the raster in the order of the model, from 1 on',
    )
    source.add_argument(
        '--nodata',
        type=float,
        metavar='VALUE',
        help="value of pixels that do not count, in place of the file's own",
    )
    how = parser.add_argument_group('how to run')
    how.add_argument(
        '--max-memory',
        default='4GiB',
        metavar='SIZE',
        help='what the process may take; defaults to 4GiB',
    )
    how.add_argument(
        '--store',
        choices=large_choices['store'],
        default='auto',
        help='where tokens wait between layers; auto is memory if it '
        'suffices, else disk',
    )
    how.add_argument(
        '--scratch',
        metavar='DIR',
        help='where tokens on disk go; beside the mask by default',
    )
    how.add_argument(
        '--dtype',
        choices=large_choices['dtype'],
        default='fp32',
        help='of the computation',
    )
    how.add_argument(
        '--store-dtype',
        choices=large_choices['dtype'],
        help='of the waiting tokens; that of the computation by default',
    )
    how.add_argument(
        '--band-rows',
        type=int,
        metavar='N',
        help='rows of tokens that are computed at once; by default what fits',
    )
    how.add_argument(
        '--device',
        type=cli.device,
        help='such as cuda:0; a GPU if there is one',
    )
    how.add_argument(
        '--resume',
        action='store_true',
        help='go on from the last layer that a killed run completed',
    )
    how.add_argument(
        '--plan',
        action='store_true',
        help='only say what it would take; the weights are not read',
    )
    how.add_argument(
        '--verify',
        type=int,
        metavar='ROWS',
        help='run again with other bands, and tell by how much the logits of '
        'so many rows of pixels differ, or of the image; takes twice the time',
    )
    return parser.parse_args()


def summary_of(summary: dict[str, Any]) -> str:
    """A line of what there is, the most first."""
    if 'scores' in summary:
        ranking = (f'{x["class"]} {x["score"]:.1%}' for x in summary['scores'])
        return f'label: {", ".join(ranking)}'
    shares = sorted(summary['classes'].items(), key=lambda x: -x[1])
    classes = ', '.join(f'{n} {s:.1%}' for n, s in shares if s)
    text = f'valid {summary["valid"]:.1%}: {classes or "nothing"}'
    seen = summary['value_range']
    return text if seen is None else f'{text}; values {seen[0]:g}-{seen[1]:g}'


def main() -> int:
    """Read the arguments, segment, and say what came of it."""
    result = infer_large(
        **vars(parse()),
        say=lambda x: print(x, flush=True),
        warn=lambda x: print(f'infer_large.py: warning: {x}', file=sys.stderr),
    )

    for image in result.results.values():
        for path in image.written:
            print(path)
        if image.difference is not None:
            print(f'largest difference of logits: {image.difference:.2e}')
        print(summary_of(image.summary))
    for name, value in result.metrics.items():
        print(f'{name}: {value:.2f}')
    for name, reason in result.failures.items():
        print(f'infer_large.py: failed: {name}: {reason}', file=sys.stderr)
    return 1 if result.failures else 0


if __name__ == '__main__':
    cli.run(main)
