# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A training under ZeRO of which a process is killed, and which goes on."""

import pytest

pytest.importorskip('deepspeed')

from infsa_seg.engine.zero_checkpoint import ZeroFolder
from tests.apis.conftest import project

from .processes import run_group
from .test_train_loop import curve

__all__ = ['project']

CONFIG = """
_base_ = '{project}/tiny.py'
custom_imports = dict(
    imports=['infsa_seg', 'tests.engine.dying_hook'],
    allow_failed_imports=False,
)
custom_hooks = [dict(type='DyingHook', deaths={deaths})]
model = dict(backbone=dict(drop_path_rate=0.5))
train_cfg = dict(max_iters=10, val_interval=100)
log_processor = dict(window_size=1)
default_hooks = dict(
    logger=dict(interval=1),
    checkpoint=dict(interval=2, max_keep_ckpts=1, save_best=None),
)
"""


def train(config, work_dir, *options):
    """Two processes; how they ended, and what they said."""
    # The others are not left waiting for the one that is gone.
    return run_group(
        2,
        *('tools/train.py', str(config), '--work-dir', str(work_dir)),
        *('--launcher', 'pytorch', '--zero-stage', '2', *options),
    )


@pytest.mark.slow
def test_a_killed_training_goes_on_as_if_it_had_not_been(project, tmp_path):
    config = tmp_path / 'config.py'
    deaths = {'5': 'step', '8': 'save'}
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'

    config.write_text(CONFIG.format(project=project, deaths={}))
    status, out = train(config, whole)
    assert status == 0, out[-4000:]

    config.write_text(CONFIG.format(project=project, deaths=deaths))
    for death, last in (('5', 'iter_4.pth'), ('8', 'iter_6.pth')):
        status, out = train(config, broken, '--resume')
        assert status != 0
        assert (broken / f'died_{death}').exists(), out[-4000:]
        assert (broken / 'last_checkpoint').read_text().endswith(last)
        assert [path.name for path in broken.glob('*.pth')] == [last]
    assert (broken / '.iter_8.pth.part').is_dir()

    status, out = train(config, broken, '--resume')
    assert status == 0, out[-4000:]
    assert [path.name for path in broken.glob('*.pth')] == ['iter_10.pth']
    assert not list(broken.glob('.*'))
    expected, found = curve(whole), curve(broken)
    assert list(expected) == list(range(1, 11))
    assert len(set(expected.values())) == 10
    assert found == pytest.approx(expected, rel=0, abs=1e-6)


def test_a_kill_between_two_names_loses_nothing(tmp_path):
    """The old folder is away, the new one has not got its name yet."""
    old = tmp_path / '.iter_2.pth.old'
    old.mkdir()
    (old / 'x').write_text('whole')
    with pytest.raises(ValueError, match=r'no \*_model_states'):
        ZeroFolder(tmp_path / 'iter_2.pth')
    assert (tmp_path / 'iter_2.pth' / 'x').read_text() == 'whole'
    assert not old.exists()
