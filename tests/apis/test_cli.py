# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import signal
import sys
from types import SimpleNamespace

import pytest
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from torch.utils.data import DataLoader

from infsa_seg.apis import cli


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['tools/x.py'])

    def _run(main):
        with pytest.raises(SystemExit) as stop:
            cli.run(main)
        return stop.value.code, capsys.readouterr().err

    return _run


def fail(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize('returned, status', [(None, 0), (0, 0), (1, 1)])
def test_status_of_main(run, returned, status):
    assert run(lambda: returned) == (status, '')


@pytest.mark.parametrize(
    'error, line',
    [
        (ValueError('x.tif: too small\nand more'), 'x.tif: too small'),
        (FileNotFoundError(2, 'No such file', 'x.tif'), 'x.tif: No such file'),
        (ImportError('pip install mmcv'), 'pip install mmcv'),
    ],
)
def test_users_errors_are_one_line(run, error, line):
    assert run(fail(error)) == (1, f'x.py: error: {line}\n')


@pytest.mark.parametrize(
    'error', [RuntimeError('bug'), KeyError('bug'), TypeError('bug')]
)
def test_bugs_show_their_traceback(error):
    with pytest.raises(type(error)):
        cli.run(fail(error))


def test_developers_see_every_traceback(monkeypatch):
    monkeypatch.setattr(sys, 'flags', SimpleNamespace(dev_mode=True))
    with pytest.raises(ValueError, match='bad input'):
        cli.run(fail(ValueError('bad input')))


def test_misspelt_config(run):
    # Whatever scope an earlier test has left.
    with DefaultScope.overwrite_default_scope('mmseg'):
        status, err = run(lambda: MODELS.build({'type': 'NoSuchNet'}))
    assert status == 1
    assert err.startswith('x.py: error: NoSuchNet is not in the mmseg::model')


def test_error_of_a_data_worker(run):
    class Broken:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise ValueError('7.png: no picture')

    loader = DataLoader(Broken(), num_workers=1)
    assert run(lambda: list(loader)) == (
        1,
        'x.py: error: ValueError: 7.png: no picture\n',
    )


def test_interrupt(run):
    assert run(fail(KeyboardInterrupt())) == (130, 'x.py: interrupted\n')


def test_error_on_top_of_an_interrupt(run):
    """As when a data worker that was interrupted too is missed."""

    def main():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError('DataLoader worker exited unexpectedly')

    assert run(main) == (130, 'x.py: interrupted\n')
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
