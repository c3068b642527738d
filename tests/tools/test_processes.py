# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What only shows in a process of its own."""

import os
import signal
import time
from pathlib import Path

import mmseg
import pytest

from infsa_seg.models.utils import check_checkpoint
from tests.apis.conftest import REPO


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f'{path} did not appear'
        time.sleep(0.05)


def test_interrupt(command, project, tmp_path):
    """Ctrl-C, in the middle of a training that saves all the time."""
    process = command(
        REPO / 'tools' / 'train.py',
        project / 'tiny.py',
        '--cfg-options',
        'train_cfg.max_iters=100000',
        'train_cfg.val_interval=100000',
        'default_hooks.checkpoint.interval=1',
        'train_dataloader.num_workers=1',
        cwd=tmp_path,
        start_new_session=True,
    )
    work_dir = tmp_path / 'work_dirs' / 'tiny'
    wait_for(work_dir / 'iter_2.pth', process)
    # As a terminal does it: to the data workers too.
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == 'train.py: interrupted'
    assert 'Traceback' not in err
    assert not list(work_dir.glob('.*'))
    for checkpoint in work_dir.glob('*.pth'):
        check_checkpoint(checkpoint)
    check_checkpoint((work_dir / 'last_checkpoint').read_text())


@pytest.mark.parametrize(
    'name', ['train.py', 'test.py', 'infer.py', 'infer_large.py']
)
def test_unusable_installation_is_one_line(command, tmp_path, name):
    package = tmp_path / 'infsa_seg'
    package.mkdir()
    reason = 'infsa_seg cannot work with mmcv 1.7.2: pip install "mmcv-lite"'
    (package / '__init__.py').write_text(f'raise ImportError({reason!r})')
    process = command(
        REPO / 'tools' / name, 'x.py', cwd=tmp_path, path=tmp_path
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err == f'{name}: error: {reason}\n'


def test_plain_mmsegmentation_trains_the_demo(command, tmp_path):
    script = Path(mmseg.__file__).parent / '.mim' / 'tools' / 'train.py'
    process = command(
        script,
        REPO / 'configs' / 'infvit_seg_demo.py',
        '--cfg-options',
        'train_cfg.max_iters=2',
        'train_cfg.val_interval=100',
        'train_dataloader.batch_size=1',
        'train_dataloader.num_workers=0',
        'train_dataloader.persistent_workers=False',
        'default_hooks.logger.interval=1',
        cwd=tmp_path,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert '[2/2]' in out
    checkpoint = tmp_path / 'work_dirs' / 'infvit_seg_demo' / 'iter_2.pth'
    check_checkpoint(checkpoint)
