# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Convert DeepGlobe land cover: ``python .../deepglobe.py DIR``.

DIR holds ``land-train`` or ``train`` with ``ID_sat.jpg`` and ``ID_mask.png``;
only there are the labels published. Unknown land is ignored. The authors name
no images for validation: every tenth is, in the order of their numbers, or
those of a list.
"""

import argparse
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
        find_folder,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'deepglobe.py: error: {error}')

CLASSES = ('urban', 'agriculture', 'rangeland', 'forest', 'water', 'barren')
PALETTE = [
    (0, 255, 255),
    (255, 255, 0),
    (255, 0, 255),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 255),
]
IMAGE = '_sat.jpg'


def find(root: Path, val_list: Path | None) -> list[Pair]:
    """The images that have masks."""
    if any(root.glob(f'*{IMAGE}')):
        folder = root
    else:
        folder = find_folder(root, ['land-train', 'train'])
    images = {
        image.name.removesuffix(IMAGE): image
        for image in folder.glob(f'*{IMAGE}')
    }
    names = sorted(images, key=lambda name: (len(name), name))
    if val_list is None:
        chosen = set(names[9::10])
    else:
        chosen = set(val_list.read_text().split())
        lost = sorted(chosen - images.keys())
        if lost:
            raise ValueError(
                f'{val_list}: lists {lost[0]}, but there is no '
                f'{folder / lost[0]}{IMAGE}; list numbers such as 119'
            )
    pairs = [
        Pair(
            'val' if name in chosen else 'train',
            name,
            images[name],
            folder / f'{name}_mask.png',
        )
        for name in names
    ]
    check_masks(pairs, 'give the folder of the training data')
    return pairs


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(
        description='Convert the DeepGlobe land cover data set'
    )
    add_arguments(parser, 'data/deepglobe')
    parser.add_argument(
        '--val-list',
        type=Path,
        metavar='FILE',
        help='text file with the numbers of the images for validation; by '
        'default every tenth',
    )
    args = parser.parse_args()
    conversion = Conversion(
        args.out_dir,
        # The authors say that not all values are pure, and to cut at 128.
        Colours(PALETTE, threshold=128),
        CLASSES,
        PALETTE,
        args.copy,
        args.overwrite,
    )
    conversion.run(find(args.dataset_path, args.val_list))


if __name__ == '__main__':
    cli.run(main)
