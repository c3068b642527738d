# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What training takes: ``python tools/estimate_memory.py CONFIG``."""

import sys
from argparse import ArgumentParser, BooleanOptionalAction

try:
    from infsa_seg.apis import cli, describe_estimate, estimate_memory
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'estimate_memory.py: error: {error}')


def main() -> None:
    """Read the arguments, and say what a rank will take."""
    parser = ArgumentParser(
        description='Foresee memory and communication per rank of a step of '
        'training, without doing it; exit status 0 whether it fits or not'
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        '--world-size',
        type=cli.positive,
        default=1,
        metavar='N',
        help='processes in all, one a device',
    )
    parser.add_argument(
        '--spatial-parallel-size',
        type=cli.positive,
        default=1,
        metavar='P',
        help='how many of them share an image',
    )
    parser.add_argument(
        '--crop',
        type=cli.positive,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help="in pixels; the size of the config's data preprocessor if not "
        'given',
    )
    parser.add_argument(
        '--zero-stage',
        type=int,
        choices=range(4),
        metavar='S',
        help="0 to 3; the config's if not given",
    )
    parser.add_argument(
        '--batch-size',
        type=cli.positive,
        metavar='B',
        help="images of a spatial group; the config's if not given",
    )
    parser.add_argument(
        '--precision',
        choices=('fp32', 'bf16', 'fp16'),
        help="of weights and activations; the config's if not given",
    )
    parser.add_argument(
        '--recompute',
        action=BooleanOptionalAction,
        help="activation checkpointing; the config's if not given",
    )
    parser.add_argument(
        '--device-memory',
        nargs='+',
        default=['40GiB', '80GiB'],
        metavar='SIZE',
        help='memory of the devices in question (40GiB and 80GiB)',
    )
    parser.add_argument(
        '--reserve',
        default='2GiB',
        metavar='SIZE',
        help='what of it is not to be had: context, NCCL, gaps (2GiB)',
    )
    args = vars(parser.parse_args())
    devices, reserve = args.pop('device_memory'), args.pop('reserve')
    if args['crop']:
        args['crop'] = tuple(args['crop'])
    found = estimate_memory(**args)
    for line in describe_estimate(found, devices, reserve, **args):
        print(line)


if __name__ == '__main__':
    cli.run(main)
