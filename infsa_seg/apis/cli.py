# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the tools have in common: arguments, and how they end.

A tool ends with status 0, with 1 and one line for an error of its user, with
2 for wrong arguments, with 130 after Ctrl-C. A bug shows its traceback; so
does everything under ``python -X dev``.
"""

import os
import signal
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from mmengine.config import DictAction

from .errors import one_line


class CfgOptions(DictAction):
    """mmengine's ``key=value`` arguments; one without ``=`` is refused."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Sequence[str],
        option_string: str | None = None,
    ) -> None:
        """Parse ``values`` into a dictionary by dotted key."""
        for value in values:
            if '=' not in value:
                parser.error(f'{option_string}: {value!r} is not key=value')
        super().__call__(parser, namespace, values, option_string)


def add_config_arguments(parser: ArgumentParser) -> None:
    """Add ``config`` and ``--cfg-options``."""
    parser.add_argument(
        'config', help='config file, or infsa_seg::NAME.py for one of ours'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        metavar='KEY=VALUE',
        help='override settings of the config; lists as key="[a,b]" or '
        'key=a,b without white space',
    )


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add what mmengine's runner takes: work directory and launcher."""
    parser.add_argument(
        '--work-dir', help='where logs, metrics and checkpoints go'
    )
    parser.add_argument(
        '--launcher',
        choices=('none', 'pytorch', 'slurm', 'mpi'),
        default='none',
        help='how the processes were started',
    )
    # torch.distributed.launch passes this, torchrun sets LOCAL_RANK.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def add_train_arguments(parser: ArgumentParser) -> None:
    """Add how to train: from where on, how precisely, shared by whom."""
    parser.add_argument(
        '--resume',
        nargs='?',
        const=True,
        default=False,
        metavar='CHECKPOINT',
        help='go on from this checkpoint, or from the last one in the work '
        'directory',
    )
    parser.add_argument(
        '--amp', action='store_true', help='train in mixed precision'
    )
    parser.add_argument(
        '--zero-stage',
        type=int,
        choices=range(4),
        metavar='N',
        help="share the optimizer's state (1), gradients (2) and weights (3) "
        "between the processes with DeepSpeed's ZeRO; 0 shares nothing",
    )


def parse_run_arguments(parser: ArgumentParser) -> dict[str, Any]:
    """The arguments by name, ready for the function of the tool."""
    args = vars(parser.parse_args())
    # mmengine reads it from there whatever the launcher.
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    return args


def positive(value: str) -> int:
    """The type of an argument that is a number of things."""
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentTypeError(f'{value!r} is no positive integer')
    return int(value)


def device(value: str) -> torch.device:
    """The type of an argument that names where something is computed."""
    try:
        torch.ones(1, device=value).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ArgumentTypeError(
            f'{value!r} is not there to compute on'
        ) from error
    return torch.device(value)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a tool and exit with its status.

    Args:
        main (callable): Parses the arguments and does the work; returns the
            exit status, None for 0.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    # Jobs in the background of a shell script ignore it, and shall.
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        status = main() or 0
    except (Exception, KeyboardInterrupt) as error:
        # Data workers are interrupted as well, and PyTorch may raise an error
        # about their end on top.
        if interrupted or isinstance(error, KeyboardInterrupt):
            _say('interrupted')
            status = 130
        elif sys.flags.dev_mode or not _is_users(error):
            raise
        else:
            _say(f'error: {one_line(error)}')
            status = 1
    finally:
        signal.signal(signal.SIGINT, previous)
    sys.exit(status)


def _say(text: str) -> None:
    print(f'{Path(sys.argv[0]).name}: {text}', file=sys.stderr, flush=True)


def _is_users(error: Exception) -> bool:
    """Whether an error is one that the user can mend.

    By the convention of the package that is ValueError, or one of the
    operating system or an installation. Upstream also refuses names and
    arguments of a config in other ways, while it builds what they stand for.
    """
    if isinstance(error, (ValueError, OSError, ImportError)):
        return True
    return isinstance(
        error, (KeyError, TypeError, AssertionError)
    ) and 'build_from_cfg' in {
        frame.name for frame in traceback.extract_tb(error.__traceback__)
    }
