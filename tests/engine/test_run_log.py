# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a run by our configs writes: text, JSON and TensorBoard."""

import json
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from infsa_seg.apis import cli, load_config, train
from infsa_seg.engine import ShortLogProcessor
from tests.apis.conftest import REPO, project

__all__ = ['project']


def config(project):
    """The project's config with TensorBoard."""
    base = f"'{REPO}/configs/_base_/"
    text = (project / 'tiny.py').read_text()
    assert base + "default_runtime.py'" in text
    path = project / 'tiny_tensorboard.py'
    path.write_text(
        text.replace(f'{base}default_runtime', f'{base}tensorboard')
    )
    return path


class Writer:
    """Stands in for TensorBoard's where that is not installed."""

    found: dict

    def __init__(self, folder):
        Writer.found = {}

    def add_text(self, name, text):
        assert name == 'config'

    def add_scalar(self, name, value, step):
        self.found.setdefault(name, []).append((step, float(value)))

    def close(self):
        self.found['closed'] = []


def read_events(work_dir):
    """Steps and values by name."""
    if find_spec('tensorboard') is None:
        assert 'closed' in Writer.found
        return Writer.found
    from tensorboard.backend.event_processing import event_accumulator

    (path,) = work_dir.glob('*/vis_data/events.*')
    events = event_accumulator.EventAccumulator(str(path))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()['scalars']
    }


@pytest.fixture(scope='module')
def logs(project, tmp_path_factory):
    """Text, scalars of the JSON log, and scalars of TensorBoard."""
    work_dir = tmp_path_factory.mktemp('logs')
    with pytest.MonkeyPatch.context() as patch:
        if find_spec('tensorboard') is None:
            module = ModuleType('torch.utils.tensorboard')
            module.SummaryWriter = Writer
            patch.setitem(sys.modules, module.__name__, module)
        train(
            config(project),
            work_dir=str(work_dir),
            cfg_options={
                'train_cfg.max_iters': 4,
                'model.backbone.attn_cfg.variant': 'linear',
                'default_hooks.logger.interval': 2,
            },
        )
    (text,) = work_dir.glob('*/*.log')
    (scalars,) = work_dir.glob('*/vis_data/scalars.json')
    lines = scalars.read_text().splitlines()
    return (
        text.read_text(),
        [json.loads(line) for line in lines],
        read_events(work_dir),
    )


def test_scalars_are_all_there(logs):
    _, scalars, _ = logs
    first, second = scalars[:2]
    assert [first['step'], second['step']] == [2, 4]
    for index in range(2):
        for name in ('mean', 'min', 'max'):
            assert 0.85 < second[f'gamma/{index:02d}_{name}'] < 0.95
    assert first['gamma/00_mean'] != second['gamma/00_mean']
    assert second['tokens_per_s'] > 0
    assert second['memory'] > 50


def test_tensorboard_has_what_the_json_log_has(logs):
    _, scalars, events = logs
    for name in ('loss', 'lr', 'tokens_per_s', 'memory', 'gamma/01_mean'):
        assert [step for step, _ in events[name]] == [2, 4]
        for (_, value), line in zip(events[name], scalars, strict=False):
            assert value == pytest.approx(line[name])
    assert [step for step, _ in events['mIoU']] == [4]


def test_lines_stay_short(logs):
    text, _, _ = logs
    lines = [line for line in text.splitlines() if 'Iter(train)' in line]
    assert len(lines) == 2
    for line in lines:
        assert 'gamma' not in line
        assert '  tokens_per_s: ' in line
        assert '  loss: ' in line
    assert text.count('gamma by layer, mean (heads): 0: 0.9') == 2


def test_without_tensorboard_one_line_says_what_to_install(
    project, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: train(config(project), str(tmp_path)) and 0)
    assert end.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'error: Please run "pip install future tensorboard"' in error


def test_the_config_of_tensorboard_keeps_the_rest():
    cfg = load_config(REPO / 'configs' / '_base_' / 'tensorboard.py')
    assert [backend.type for backend in cfg.visualizer.vis_backends] == [
        'LocalVisBackend',
        'TensorboardVisBackend',
    ]
    assert cfg.visualizer.type == 'SegLocalVisualizer'


def test_what_is_hidden_can_be_chosen(monkeypatch):
    line = 'Iter [ 2/10]  time: 0.1  gamma/00_mean: 0.9000  loss: 1.0  a: 2'
    base = 'infsa_seg.engine.log_processor.LogProcessor.get_log_after_iter'
    monkeypatch.setattr(base, lambda *args: ({'a': 2}, line))
    short = ShortLogProcessor().get_log_after_iter(None, 0, 'train')
    assert short == ({'a': 2}, 'Iter [ 2/10]  time: 0.1  loss: 1.0  a: 2')
    shorter = ShortLogProcessor(hidden='gamma/|a$|loss')
    _, text = shorter.get_log_after_iter(None, 0, 'train')
    assert text == 'Iter [ 2/10]  time: 0.1  a: 2'
