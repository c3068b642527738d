# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Train a segmentor: ``python tools/train.py CONFIG``."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli, train
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'train.py: error: {error}')


def main() -> None:
    """Read the arguments and train."""
    parser = ArgumentParser(description='Train a segmentor')
    cli.add_config_arguments(parser)
    cli.add_run_arguments(parser)
    cli.add_train_arguments(parser)
    parser.add_argument(
        '--spatial-parallel-size',
        type=cli.positive,
        metavar='P',
        help='share every image between P processes, a band of its rows on '
        'each; needs DeepSpeed',
    )
    train(**cli.parse_run_arguments(parser))


if __name__ == '__main__':
    cli.run(main)
