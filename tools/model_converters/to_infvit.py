# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Make a checkpoint of InfViT of one of another Vision Transformer."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli
    from infsa_seg.apis.to_infvit import convert_to_infvit
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'to_infvit.py: error: {error}')


def main() -> None:
    """Read the arguments and convert."""
    parser = ArgumentParser(
        description='Make a checkpoint of InfViT of one of a Vision '
        'Transformer of timm, DeiT, DINO, DINOv2, torchvision, '
        'mmsegmentation, mmpretrain, transformers or infsa'
    )
    parser.add_argument('source', help='checkpoint to read')
    parser.add_argument('out', help='file to write')
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        '--grid',
        nargs=2,
        type=cli.positive,
        metavar=('ROWS', 'COLUMNS'),
        help='of the positions, where the file does not say so',
    )
    size.add_argument(
        '--img-size',
        nargs=2,
        type=cli.positive,
        metavar=('HEIGHT', 'WIDTH'),
        help='in pixels, of the images that the source was trained on',
    )
    parser.add_argument(
        '--num-heads',
        type=cli.positive,
        help='heads of the source, which the weights do not tell',
    )
    parser.add_argument(
        '--overwrite', action='store_true', help='replace a file that exists'
    )
    args = parser.parse_args()
    for name in ('grid', 'img_size'):
        value = getattr(args, name)
        setattr(args, name, None if value is None else tuple(value))
    print(convert_to_infvit(**vars(args)))


if __name__ == '__main__':
    cli.run(main)
