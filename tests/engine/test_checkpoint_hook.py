# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.fileio import LocalBackend
from mmengine.runner import find_latest_checkpoint

from infsa_seg.engine import SafeCheckpointHook

from .toy import build_runner, validation

GOOD = (1.0, 1.0)


def prepare(work_dir, scores=(), steps=4, hook='SafeCheckpointHook', **kwargs):
    settings = {}
    if scores:
        settings = {
            **validation(scores),
            'train_cfg': {
                'type': 'IterBasedTrainLoop',
                'max_iters': steps,
                'val_interval': 1,
            },
        }
    checkpoint = {
        'type': hook,
        'by_epoch': False,
        'interval': 1,
        'backend_args': {'backend': 'atomic'},
        **kwargs.pop('checkpoint', {}),
    }
    return build_runner(
        work_dir,
        [GOOD] * steps,
        default_hooks={'checkpoint': checkpoint},
        **settings,
        **kwargs,
    )


def saved(work_dir):
    return sorted(path.name for path in work_dir.glob('*.pth'))


def test_the_newest_are_kept(tmp_path):
    runner = prepare(tmp_path, checkpoint={'max_keep_ckpts': 2})
    runner.train()
    assert saved(tmp_path) == ['iter_3.pth', 'iter_4.pth']
    last = (tmp_path / 'last_checkpoint').read_text()
    assert last == str(tmp_path / 'iter_4.pth')
    assert not list(tmp_path.glob('.*'))


def watched(runner):
    """What else there was whenever a checkpoint was complete."""
    found = []
    save = runner.save_checkpoint

    def save_and_look(out_dir, filename, *args, **kwargs):
        before = saved(Path(out_dir))
        last = find_latest_checkpoint(out_dir)
        found.append((filename, before, last and Path(last).name))
        save(out_dir, filename, *args, **kwargs)

    runner.save_checkpoint = save_and_look
    return found


def test_nothing_goes_before_the_next_is_there(tmp_path):
    runner = prepare(tmp_path, checkpoint={'max_keep_ckpts': 1})
    found = watched(runner)
    runner.train()
    assert found == [
        ('iter_1.pth', [], None),
        ('iter_2.pth', ['iter_1.pth'], 'iter_1.pth'),
        ('iter_3.pth', ['iter_2.pth'], 'iter_2.pth'),
        ('iter_4.pth', ['iter_3.pth'], 'iter_3.pth'),
    ]


def test_the_best_is_kept_until_a_better_one_is_there(tmp_path):
    runner = prepare(
        tmp_path,
        scores=(1.0, 0.5, 2.0, 1.5),
        checkpoint={'max_keep_ckpts': 1, 'save_best': 'mIoU'},
    )
    found = watched(runner)
    runner.train()
    at = [name for name, *_ in found].index('best_mIoU_iter_3.pth')
    assert found[at][1] == ['best_mIoU_iter_1.pth', 'iter_3.pth']
    # Saved again, with the best score, before the old best goes.
    assert found[at + 1][0] == 'iter_3.pth'
    assert 'best_mIoU_iter_1.pth' in found[at + 1][1]
    assert saved(tmp_path) == ['best_mIoU_iter_3.pth', 'iter_4.pth']


def test_the_best_of_several_scores(tmp_path):
    hook = {'save_best': ['mIoU', 'mAcc'], 'max_keep_ckpts': 1}
    prepare(tmp_path, scores=(1.0, 2.0, 1.5, 0.5), checkpoint=hook).train()
    assert saved(tmp_path) == [
        'best_mAcc_iter_4.pth',
        'best_mIoU_iter_2.pth',
        'iter_4.pth',
    ]


def test_auto_takes_the_first_score_and_goes_on(tmp_path):
    hook = {'save_best': 'auto', 'rule': 'greater', 'max_keep_ckpts': 1}
    prepare(tmp_path, (1.0, 0.5), 2, checkpoint=hook).train()
    assert saved(tmp_path) == ['best_mIoU_iter_1.pth', 'iter_2.pth']
    runner = prepare(tmp_path, (0.7, 3.0), 4, checkpoint=hook, resume=True)
    runner.train()
    assert saved(tmp_path) == ['best_mIoU_iter_4.pth', 'iter_4.pth']


def test_what_an_interrupt_kept_from_going_goes_later(tmp_path, monkeypatch):
    hook = {'max_keep_ckpts': 1}
    with monkeypatch.context() as patch:
        patch.setattr(SafeCheckpointHook, '_remove', stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, checkpoint=hook).train()
    assert saved(tmp_path) == ['iter_1.pth', 'iter_2.pth']
    assert find_latest_checkpoint(tmp_path).endswith('iter_2.pth')
    half = tmp_path / '.iter_1.pth.gone'
    half.mkdir()
    prepare(tmp_path, checkpoint=hook, resume=True).train()
    assert saved(tmp_path) == ['iter_4.pth']
    assert not half.exists()


def stop(*args):
    raise KeyboardInterrupt


def train_until_killed(work_dir, nth):
    """Die in the middle of writing a checkpoint."""
    put = LocalBackend.put
    count = 0

    def put_half(self, obj, path):
        nonlocal count
        count += 1
        if count == nth:
            Path(path).write_bytes(obj[: len(obj) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, obj, path)

    LocalBackend.put = put_half
    prepare(work_dir, checkpoint={'max_keep_ckpts': 1}).train()


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    # A fork has what this process has imported.
    context = multiprocessing.get_context('fork')
    process = context.Process(target=train_until_killed, args=(tmp_path, 3))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert saved(tmp_path) == ['iter_2.pth']
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / 'iter_2.pth')
    runner = prepare(tmp_path, checkpoint={'max_keep_ckpts': 1}, resume=True)
    runner.train()
    assert runner.iter == 4
    assert saved(tmp_path) == ['iter_4.pth']


def test_folders_are_pruned_out_of_sight(tmp_path, monkeypatch):
    """Half of one never has the name of a whole one."""
    hook = SafeCheckpointHook()
    hook.file_backend = LocalBackend()
    path = tmp_path / 'iter_1.pth'
    path.mkdir()
    (path / 'a').write_text('a')
    where = 'infsa_seg.engine.hooks.checkpoint_hook.shutil.rmtree'
    with monkeypatch.context() as patch:
        # Stopped before it could remove anything.
        patch.setattr(where, lambda path, ignore_errors: None)
        hook._remove(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ['.iter_1.pth.gone']
    path.mkdir()
    hook._remove(str(path))
    assert not list(tmp_path.iterdir())
    # What somebody else has removed is no error.
    hook._remove(str(path))


def test_a_folder_is_not_published(tmp_path, monkeypatch):
    lines = []
    runner = SimpleNamespace(logger=SimpleNamespace(warning=lines.append))
    hook = SafeCheckpointHook(published_keys='state_dict')
    hook._publish_model(runner, str(tmp_path))
    assert 'zero_to_fp32.py' in lines[0]


def test_published_files_still_are(tmp_path):
    hook = {'published_keys': ['state_dict'], 'max_keep_ckpts': 1}
    prepare(tmp_path, steps=1, checkpoint=hook).train()
    (name,) = set(saved(tmp_path)) - {'iter_1.pth'}
    assert list(torch.load(tmp_path / name)) == ['state_dict']
