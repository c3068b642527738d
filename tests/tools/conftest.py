# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import os
import runpy
import subprocess
import sys
from typing import NamedTuple

import pytest
from mmengine.logging import MMLogger

from tests.apis.conftest import REPO, project, trained

__all__ = ['project', 'trained']


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def tool(monkeypatch, capfd):
    """Run a tool in this process, as ``python tools/NAME ARGS`` would."""

    def run(name, *args):
        argv = [str(REPO / 'tools' / name), *map(str, args)]
        monkeypatch.setattr(sys, 'argv', argv)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(argv[0], run_name='__main__')
        # The next run would write to this one's captured output.
        MMLogger._instance_dict.clear()
        return Outcome(stop.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def command():
    """Start a script in a process of its own, from a directory of its own."""

    def start(script, *args, cwd, path=REPO, **kwargs):
        return subprocess.Popen(
            [sys.executable, script, *map(str, args)],
            cwd=cwd,
            env=os.environ | {'PYTHONPATH': str(path), 'OMP_NUM_THREADS': '1'},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    return start
