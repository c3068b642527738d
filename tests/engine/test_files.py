# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmengine.fileio import get_file_backend
from mmengine.runner import save_checkpoint

from infsa_seg.engine import AtomicBackend, atomic_path

BACKEND = {'backend': 'atomic'}


def test_appears_only_when_complete(tmp_path):
    path = tmp_path / 'new' / 'x.txt'
    with atomic_path(path) as part:
        part.write_text('done')
        assert not path.exists()
        assert part.parent == path.parent
    assert path.read_text() == 'done'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_old_content_survives_what_goes_wrong(tmp_path, error):
    path = tmp_path / 'x.txt'
    path.write_text('old')
    with pytest.raises(error), atomic_path(path) as part:
        part.write_text('half')
        raise error
    assert path.read_text() == 'old'
    assert list(tmp_path.iterdir()) == [path]


def test_mmengine_finds_the_backend(tmp_path):
    backend = get_file_backend(str(tmp_path), backend_args=BACKEND)
    assert isinstance(backend, AtomicBackend)
    backend.put_text('text', tmp_path / 'x.txt')
    assert backend.get_text(tmp_path / 'x.txt') == 'text'


def test_checkpoint_is_written_through_it(tmp_path, monkeypatch):
    """Stop mmengine between the writing and the rename."""
    path = str(tmp_path / 'x.pth')
    save_checkpoint({'step': 1}, path, backend_args=BACKEND)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr('pathlib.Path.replace', interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint({'step': 2}, path, backend_args=BACKEND)
    assert torch.load(path) == {'step': 1}
    assert len(list(tmp_path.iterdir())) == 1
