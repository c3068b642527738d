# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from mmengine.config import Config

import infsa_seg
from infsa_seg.apis import load_config

from .conftest import REPO

CONFIGS = sorted(
    path.relative_to(REPO / 'configs').as_posix()
    for path in (REPO / 'configs').rglob('*.py')
    if '_base_' not in path.parts
)
PACKAGED = Path(infsa_seg.__file__).parent / '.mim' / 'configs'


@pytest.mark.parametrize('name', CONFIGS)
def test_by_path_from_anywhere(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cfg = load_config(REPO / 'configs' / name)
    assert cfg.custom_imports.imports == ['infsa_seg']
    assert cfg.default_scope == 'mmseg'


@pytest.mark.skipif(not PACKAGED.exists(), reason='package not installed')
@pytest.mark.parametrize('name', CONFIGS)
def test_by_package_name_from_anywhere(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_name = load_config(f'infsa_seg::{name}')
    assert by_name.to_dict() == load_config(REPO / 'configs' / name).to_dict()


def test_options_do_not_change_the_given_config():
    given = Config({'model': {'depth': 1}})
    cfg = load_config(given, {'model.depth': 2, 'model.width': 3})
    assert cfg.model == {'depth': 2, 'width': 3}
    assert given.model == {'depth': 1}


def test_options_for_the_runner_may_be_new():
    cfg = load_config(Config({'model': {}}), {'randomness.seed': 1})
    assert cfg.randomness.seed == 1


def test_option_for_nothing():
    with pytest.raises(ValueError, match='did you mean model'):
        load_config(Config({'model': {}}), {'modle.depth': 2})


def test_error_names_the_file(tmp_path):
    path = tmp_path / 'broken.py'
    path.write_text('model = dict(')
    with pytest.raises(ValueError, match=r'broken\.py: SyntaxError'):
        load_config(path)
    with pytest.raises(FileNotFoundError, match=r'none\.py: no such config'):
        load_config('none.py')
