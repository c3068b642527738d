# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The script that starts processes with torchrun, on two of a CPU."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip('deepspeed')

from tests.apis.conftest import project

from .processes import CPU, REPO

__all__ = ['project']


@pytest.mark.slow
def test_two_processes_train_and_save(project, tmp_path):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [
            *('bash', REPO / 'tools' / 'dist_train.sh'),
            *(project / 'tiny.py', '2', '--zero-stage', '2'),
            *('--work-dir', tmp_path, '--cfg-options'),
            *('train_cfg.max_iters=2', 'train_cfg.val_interval=2'),
            'default_hooks.checkpoint.interval=2',
        ],
        env=os.environ | CPU | {'PYTHON': sys.executable, 'PORT': str(port)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shares = {
        path.name.partition('zero_pp_rank_')[2].partition('_')[0]
        for path in (tmp_path / 'iter_2.pth').rglob('*optim_states.pt')
    }
    assert shares == {'0', '1'}
