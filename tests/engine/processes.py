# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Start the processes of a group, and let none of them stay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

REPO = Path(__file__).parents[2]
CPU = {
    'PYTHONPATH': str(REPO),
    'OMP_NUM_THREADS': '1',
    'DS_ACCELERATOR': 'cpu',
}


def run_cases(script, root, cases, num_processes, *args):
    """Run cases in a group of processes; what its first one measured."""
    (root / 'cases.json').write_text(json.dumps(cases))
    run_tool(num_processes, script.__file__, str(root), *args)
    return torch.load(root / 'results.pt', weights_only=True)


def run_tool(num_processes, *command):
    """Run a program in a group of processes; fail as it does."""
    status, out = run_group(num_processes, *command)
    assert status == 0, out[-4000:]


def run_group(num_processes, *command):
    """How a group of processes ended, and what it said."""
    process = subprocess.Popen(
        [
            sys.executable,
            *('-m', 'torch.distributed.run'),
            *('--standalone', f'--nproc_per_node={num_processes}'),
            *command,
        ],
        cwd=REPO,
        env=os.environ | CPU,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out
