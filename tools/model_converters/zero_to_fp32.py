# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Make one plain checkpoint of a folder that ZeRO saved."""

import sys
from argparse import ArgumentParser

try:
    from infsa_seg.apis import cli, convert_zero
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'zero_to_fp32.py: error: {error}')


def main() -> None:
    """Read the arguments and convert."""
    parser = ArgumentParser(
        description='Make one plain checkpoint of a folder that ZeRO saved'
    )
    parser.add_argument('folder', help='such as work_dirs/NAME/iter_8000.pth')
    parser.add_argument('out', help='file to write')
    args = parser.parse_args()
    convert_zero(args.folder, args.out)


if __name__ == '__main__':
    cli.run(main)
