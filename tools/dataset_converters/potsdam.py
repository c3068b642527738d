# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Convert ISPRS Potsdam: ``python tools/dataset_converters/potsdam.py DIR``.

DIR holds, at any depth, ``top_potsdam_*_RGB.tif`` (or IRRG, or RGBIR) and
``top_potsdam_*_label.tif`` or, with --no-boundary, the labels whose borders
between objects are left out: black there, which is ignored. The 14 tiles that
the benchmark was tested on are for validation.
"""

import argparse
import re
import sys
from pathlib import Path

try:
    from infsa_seg.apis import cli
    from infsa_seg.apis.converters import (
        Colours,
        Conversion,
        Pair,
        add_arguments,
        check_masks,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'potsdam.py: error: {error}')

CLASSES = (
    'impervious_surface',
    'building',
    'low_vegetation',
    'tree',
    'car',
    'clutter',
)
PALETTE = [
    (255, 255, 255),
    (0, 0, 255),
    (0, 255, 255),
    (0, 255, 0),
    (255, 255, 0),
    (255, 0, 0),
]
VAL = {
    *('2_13', '2_14', '3_13', '3_14', '4_13', '4_14', '4_15', '5_13', '5_14'),
    *('5_15', '6_13', '6_14', '6_15', '7_13'),
}


def find(root: Path, channels: str, boundary: bool) -> list[Pair]:
    """All tiles, which are named by two numbers."""
    kind = 'label' if boundary else 'label_noBoundary'
    images, masks = (
        {
            tile[1]: path
            for path in sorted(root.rglob('top_potsdam_*.tif'))
            if (
                tile := re.fullmatch(
                    rf'top_potsdam_(\d+_\d+)_{what}', path.stem
                )
            )
        }
        for what in (channels, kind)
    )
    if not images:
        raise FileNotFoundError(
            f'{root}: has no top_potsdam_*_{channels}.tif; unpack them, or '
            'choose others with --channels'
        )
    pairs = [
        Pair(
            'val' if tile in VAL else 'train',
            f'top_potsdam_{tile}',
            image,
            masks.get(tile, root / f'top_potsdam_{tile}_{kind}.tif'),
        )
        for tile, image in images.items()
    ]
    check_masks(pairs, 'unpack the labels of all tiles, at any depth')
    return pairs


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(
        description='Convert the ISPRS Potsdam data set'
    )
    add_arguments(parser, 'data/potsdam')
    parser.add_argument(
        '--channels',
        choices=('RGB', 'IRRG', 'RGBIR'),
        default='RGB',
        help='which of the images',
    )
    parser.add_argument(
        '--no-boundary',
        action='store_true',
        help='use the labels without the borders of objects',
    )
    args = parser.parse_args()
    conversion = Conversion(
        args.out_dir,
        Colours(PALETTE),
        CLASSES,
        PALETTE,
        args.copy,
        args.overwrite,
    )
    pairs = find(args.dataset_path, args.channels, not args.no_boundary)
    conversion.run(pairs)


if __name__ == '__main__':
    cli.run(main)
