# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Convert LoveDA: ``python tools/dataset_converters/loveda.py DIR``.

DIR holds ``Train`` and ``Val``, unpacked, and ``Test`` if wanted, each with
``Rural`` and ``Urban``. What the masks call 0, no data, is ignored; their
classes 1 to 7 become 0 to 6.
"""

import argparse
import sys
from pathlib import Path

try:
    from infsa_seg.apis import cli
    from infsa_seg.apis.converters import (
        IGNORED,
        Conversion,
        Pair,
        Values,
        add_arguments,
        check_masks,
        find_folder,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'loveda.py: error: {error}')

CLASSES = (
    'background',
    'building',
    'road',
    'water',
    'barren',
    'forest',
    'agricultural',
)
PALETTE = [
    (255, 255, 255),
    (255, 0, 0),
    (255, 255, 0),
    (0, 0, 255),
    (159, 129, 183),
    (0, 255, 0),
    (255, 195, 128),
]


def find(root: Path) -> list[Pair]:
    """All images, with their masks where these are published."""
    pairs = []
    for split in ('train', 'val', 'test'):
        try:
            folder = find_folder(root, [split.title(), split])
        except FileNotFoundError:
            if split == 'test':
                break
            raise
        for image in sorted(folder.rglob('images_png/*.png')):
            mask = image.parents[1] / 'masks_png' / image.name
            known = None if split == 'test' else mask
            pairs.append(Pair(split, image.stem, image, known))
    check_masks(pairs, 'unpack it anew')
    return pairs


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(description='Convert the LoveDA data set')
    add_arguments(parser, 'data/loveda')
    args = parser.parse_args()
    conversion = Conversion(
        args.out_dir,
        Values({0: IGNORED, **{index + 1: index for index in range(7)}}),
        CLASSES,
        PALETTE,
        args.copy,
        args.overwrite,
    )
    conversion.run(find(args.dataset_path))


if __name__ == '__main__':
    cli.run(main)
