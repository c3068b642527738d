# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Measure a segmentor: ``python tools/test.py CONFIG CHECKPOINT``."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli, evaluate
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'test.py: error: {error}')


def main() -> None:
    """Read the arguments, test, and leave the metrics in the log."""
    parser = ArgumentParser(description='Test a segmentor')
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='weights to test')
    cli.add_run_arguments(parser)
    parser.add_argument(
        '--out', metavar='DIR', help='write the predictions as PNG masks'
    )
    parser.add_argument(
        '--show', action='store_true', help='show the predictions'
    )
    parser.add_argument(
        '--show-dir', metavar='DIR', help='write pictures of the predictions'
    )
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        metavar='SECONDS',
        help='how long --show shows each',
    )
    parser.add_argument(
        '--tta', action='store_true', help='augment the test images'
    )
    evaluate(**cli.parse_run_arguments(parser))


if __name__ == '__main__':
    cli.run(main)
