# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What holds for every test: seeds, threads, poisoned memory, shared data."""

import logging
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from mmengine.logging import MMLogger

import infsa_seg  # noqa: F401 (before any test imports mmseg.models)

SHARED = Path(__file__).parents[2] / 'shared'


def pytest_configure():
    """Make runs repeatable, and reads of uninitialised memory show."""
    # Where pytest-xdist has a process for each core, one thread in each.
    alone = 'PYTEST_XDIST_WORKER' not in os.environ
    torch.set_num_threads(2 if alone else 1)
    # A shell's background jobs ignore Ctrl-C, and so would our processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # In this mode torch fills what `torch.empty` returns with NaN, or with
    # the largest integer.
    torch.use_deterministic_algorithms(True)
    # The time of an example depends on what else the machine does.
    settings.register_profile(
        'infsa_seg', deadline=None, derandomize=True, max_examples=25
    )
    settings.load_profile('infsa_seg')


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def open_streams():
    """Loggers may hold the captured output of an earlier test."""
    loggers = logging.Logger.manager.loggerDict | MMLogger._instance_dict
    for logger in loggers.values():
        for handler in getattr(logger, 'handlers', ()):
            is_plain = type(handler) is logging.StreamHandler
            if is_plain and handler.stream.closed:
                # setStream would flush the closed one.
                handler.stream = sys.stderr


@pytest.fixture
def shared():
    """Folder of optional data beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f'the optional data is not at {SHARED}')
    return SHARED
