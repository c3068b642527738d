# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Train a classifier and export its backbone: ``pretrain.py CONFIG``."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli
    from infsa_seg.apis.pretrain import pretrain
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'pretrain.py: error: {error}')


def main() -> None:
    """Read the arguments, train, measure and export."""
    parser = ArgumentParser(
        description='Train a classifier, measure it and export its backbone'
    )
    cli.add_config_arguments(parser)
    cli.add_run_arguments(parser)
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='where the backbone goes; backbone.pth in the work directory '
        'if not given',
    )
    cli.add_train_arguments(parser)
    result = pretrain(**cli.parse_run_arguments(parser))
    if result is not None:
        for name, value in result.metrics.items():
            print(f'{name}: {value:.2f}')
        print(result.weights)


if __name__ == '__main__':
    cli.run(main)
