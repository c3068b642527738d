# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest

from infsa_seg import stack

GOOD = {
    'torch': '2.13.0+cpu',
    'mmengine': '0.10.7',
    'mmcv-lite': '2.1.0',
    'mmsegmentation': '1.2.2',
    'ftfy': '6.3.1',
    'regex': '2026.1.1',
}
FORKS = {
    'onedl-mmengine': '0.10.12',
    'onedl-mmcv': '2.3.6',
    'onedl-mmsegmentation': '1.4.2',
}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that other versions are installed, None for not at all."""

    def pretend(changes):
        versions = GOOD | changes
        versions = {k: v for k, v in versions.items() if v is not None}
        monkeypatch.setattr(stack, '_installed', lambda: versions)
        monkeypatch.setattr(stack, 'find_spec', lambda module: None)

    return pretend


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'mmcv-lite': None, 'mmcv': '2.1.0'},
        {'mmengine': None, 'mmcv-lite': None, 'mmsegmentation': None} | FORKS,
    ],
)
def test_tested_stack_is_silent(installed, caplog, changes):
    installed(changes)
    stack.check_versions()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ('changes', 'name', 'remedy'),
    [
        ({'torch': '2.3.1'}, 'torch 2.3.1', 'torch>=2.4'),
        ({'torch': None}, 'torch', 'torch>=2.4'),
        ({'mmengine': None}, 'mmengine', 'mmengine>=0.10.7'),
        ({'mmengine': '0.9.1'}, 'mmengine 0.9.1', 'mmengine>=0.10.7'),
        ({'mmcv-lite': None}, 'mmcv', 'mmcv-lite==2.1.0'),
        ({'mmcv-lite': '2.2.0'}, 'mmcv-lite 2.2.0', 'mmcv-lite==2.1.0'),
        (
            {'mmcv-lite': None, 'onedl-mmcv': '2.3.6'},
            'onedl-mmcv 2.3.6',
            'mmcv-lite==2.1.0',
        ),
        ({'mmsegmentation': '1.2.0'}, 'mmsegmentation 1.2.0', '>=1.2.2'),
        ({'mmsegmentation': None}, 'mmseg', 'mmsegmentation>=1.2.2'),
        ({'ftfy': None}, 'ftfy', 'ftfy'),
        ({'regex': None}, 'regex', 'regex'),
    ],
)
def test_what_cannot_work(installed, changes, name, remedy):
    installed(changes)
    with pytest.raises(stack.IncompatibleError) as error:
        stack.check_versions()
    message = str(error.value)
    assert name in message
    assert remedy in message.partition('pip install ')[2]
    assert '\n' not in message


def test_untested_versions_are_one_warning(installed, caplog):
    installed({'torch': '2.99.0', 'mmcv-lite': '2.0.1'})
    stack.check_versions()
    (message,) = caplog.messages
    assert 'torch 2.99.0' in message
    assert 'mmcv-lite 2.0.1' in message


def test_a_checkout_on_the_path_has_no_version_to_check(
    installed, monkeypatch
):
    installed({'mmsegmentation': None})
    monkeypatch.setattr(stack, 'find_spec', lambda module: object())
    stack.check_versions()
