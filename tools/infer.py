# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Segment pictures: ``python tools/infer.py CONFIG CHECKPOINT INPUT...``."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli, infer
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'infer.py: error: {error}')


def main() -> int:
    """Read the arguments, segment, and say what came of it."""
    parser = ArgumentParser(description='Segment pictures, each as a whole')
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='trained weights')
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help='a picture file, or scene:SIZE[:NUMBER] for a synthetic scene',
    )
    parser.add_argument(
        '--out',
        required=True,
        metavar='DIR',
        help='directory for NAME_mask.png and NAME_overlay.png',
    )
    parser.add_argument(
        '--labels',
        metavar='DIR',
        help='directory with NAME.png, true class indices, to measure against',
    )
    parser.add_argument('--device', help='such as cuda:0; a GPU if there is')
    result = infer(**vars(parser.parse_args()))

    for path in result.written:
        print(path)
    for name, value in result.metrics.items():
        print(f'{name}: {value:.2f}')
    for name, reason in result.failures.items():
        print(f'infer.py: failed: {name}: {reason}', file=sys.stderr)
    return 1 if result.failures else 0


if __name__ == '__main__':
    cli.run(main)
