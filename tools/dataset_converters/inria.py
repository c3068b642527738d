# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Convert Inria Aerial Image Labeling: ``python .../inria.py DIR``.

DIR holds ``train/images``, ``train/gt`` and, if wanted, ``test/images``. The
first five images of each city are for validation, as the authors suggest.
"""

import argparse
import re
import sys
from pathlib import Path

try:
    from infsa_seg.apis import cli
    from infsa_seg.apis.converters import (
        Conversion,
        Pair,
        Values,
        add_arguments,
        check_masks,
        find_folder,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'inria.py: error: {error}')

CLASSES = ('background', 'building')
PALETTE = [(96, 96, 96), (230, 80, 60)]
# Images of each city for validation.
NUM_VAL = 5


def find(root: Path) -> list[Pair]:
    """All images, with their masks where these are published."""
    train = find_folder(root, ['train'])
    pairs = []
    for image in sorted((train / 'images').glob('*.tif')):
        number = re.fullmatch(r'\D+(\d+)', image.stem)
        if number is None:
            raise ValueError(
                f'{image}: is not called CITY and a number; remove it'
            )
        split = 'val' if int(number[1]) <= NUM_VAL else 'train'
        mask = train / 'gt' / image.name
        pairs.append(Pair(split, image.stem, image, mask))
    check_masks(pairs, 'unpack train/gt, too')
    for image in sorted((train.parent / 'test' / 'images').glob('*.tif')):
        pairs.append(Pair('test', image.stem, image, None))
    return pairs


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(
        description='Convert the Inria Aerial Image Labeling data set'
    )
    add_arguments(parser, 'data/inria')
    args = parser.parse_args()
    conversion = Conversion(
        args.out_dir,
        Values({0: 0, 255: 1}),
        CLASSES,
        PALETTE,
        args.copy,
        args.overwrite,
    )
    conversion.run(find(args.dataset_path))


if __name__ == '__main__':
    cli.run(main)
