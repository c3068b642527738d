# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""ZeRO on two processes against one plain process.

All cases run in one pair of processes, because starting them takes longer
than everything they do.
"""

import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config

pytest.importorskip('deepspeed')

from infsa_seg.apis import convert_zero, evaluate, load_config, train
from infsa_seg.engine import ZeroFolder, ZeroStrategy, leave_group
from infsa_seg.engine.zero_checkpoint import save_zero
from tests.apis.conftest import project, trained

from . import zero_process
from .processes import run_cases
from .zero_process import OPTIMIZER, build, plain_optimizer

__all__ = ['project', 'trained']

REPO = Path(__file__).parents[2]
CP = {'with_cp': True, 'frozen': True}
CLIP = {'clip_grad': {'max_norm': 0.02}}
ACCUMULATE = {'accumulative_counts': 2}
GROUPS = {
    'paramwise_cfg': {
        'norm_decay_mult': 0.0,
        'bias_decay_mult': 0.0,
        'custom_keys': {'head': {'lr_mult': 10.0}},
    }
}
OFFLOAD = {'device': 'cpu'}
CASES = [
    *(
        {'name': f'stage {n}', 'strategy': {'stage': n}, 'save': True}
        for n in range(4)
    ),
    *(
        {
            'name': f'frozen {n}',
            'strategy': {'stage': n},
            'model': CP,
            'save': True,
        }
        for n in (1, 3)
    ),
    {'name': 'clip', 'strategy': {'stage': 2}, 'optim_wrapper': CLIP},
    {
        'name': 'clip in strategy',
        'strategy': {'stage': 1, 'gradient_clipping': 0.02},
        'like': CLIP,
    },
    {
        'name': 'accumulate',
        'strategy': {'stage': 2},
        'optim_wrapper': ACCUMULATE,
    },
    {
        'name': 'accumulate in strategy',
        'strategy': {'stage': 3, 'gradient_accumulation_steps': 2},
        'like': ACCUMULATE,
    },
    {'name': 'groups', 'strategy': {'stage': 2}, 'optim_wrapper': GROUPS},
    {
        'name': 'offload optimizer',
        'strategy': {
            'stage': 2,
            'zero_optimization': {'offload_optimizer': OFFLOAD},
        },
        'save': True,
    },
    {
        'name': 'offload',
        'strategy': {
            'stage': 3,
            'zero_optimization': {
                'offload_optimizer': OFFLOAD,
                'offload_param': OFFLOAD,
            },
        },
    },
    *(
        {
            'name': f'bf16 {n} {variant}',
            'strategy': {'stage': n, 'bf16': {'enabled': True}},
            'model': {
                'attn_cfg': {'variant': variant},
                'with_cp': True,
                'batch_norm': False,
            },
            'save': n > 1,
        }
        for n, variant in enumerate(['softmax', 'pure', 'neumann', 'linear'])
    ),
]
NAMES = [case['name'] for case in CASES]
EXACT = [name for name in NAMES if 'bf16' not in name]
SAVED = [case['name'] for case in CASES if case.get('save')]


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    """Where two processes leave their checkpoints."""
    return tmp_path_factory.mktemp('zero')


@pytest.fixture(scope='session')
def results(folder):
    return run_cases(zero_process, folder, CASES, 2)


@pytest.fixture
def result(results, request):
    """The result of the case that the test is about."""
    result = results[request.getfixturevalue('name')]
    assert 'error' not in result, result.get('traceback')
    return result


@pytest.fixture(autouse=True)
def alone():
    yield
    leave_group()


def plain(case, steps=5):
    """The same training in this process, by mmengine alone."""
    model, batches = build(**case.get('model', {}))
    wrapper, scheduler = plain_optimizer(
        model, {**case.get('optim_wrapper', {}), **case.get('like', {})}
    )
    model.train()
    losses = []
    for inputs, labels in batches[:steps]:
        with wrapper.optim_context(model):
            loss = model(inputs, labels)['loss']
        wrapper.update_params(loss)
        scheduler.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize('name', EXACT)
def test_equals_one_plain_process(result, name):
    losses, weights = plain(CASES[NAMES.index(name)])
    assert np.allclose(result['losses'], losses, rtol=0, atol=1e-5)
    assert result['weights'].keys() == weights.keys()
    for key, value in weights.items():
        assert torch.allclose(
            result['weights'][key], value, rtol=0, atol=1e-5
        ), key


def test_the_settings_make_a_difference(results):
    usual = results['stage 2']['losses']
    for name in ('clip', 'accumulate', 'groups'):
        assert abs(results[name]['losses'][-1] - usual[-1]) > 1e-4


@pytest.mark.parametrize('name', ['groups'])
def test_groups_are_few_and_keep_their_settings(result, name):
    assert sorted(result['groups']) == [(0.01, 0.0), (0.01, 0.05), (0.1, 0.05)]


@pytest.mark.parametrize('name', [n for n in NAMES if 'bf16' in n])
def test_bf16_follows_float32(result, name):
    """Before the first step within 1e-2; then Adam takes other ways."""
    losses, _ = plain(CASES[NAMES.index(name)])
    assert result['losses'][0] == pytest.approx(losses[0], abs=1e-2)
    assert np.isfinite(result['losses']).all()
    assert result['losses'] != losses


@pytest.mark.parametrize('name', SAVED)
def test_goes_on_as_if_it_had_not_stopped(result, name):
    assert result['resumed'] == result['losses'][3:]
    assert result['resumed_iter'] == 3
    for key, value in result['weights'].items():
        assert torch.equal(result['resumed_weights'][key], value), key


@pytest.mark.parametrize('name', SAVED)
def test_one_plain_file_of_each_stage(result, name, folder, tmp_path):
    case = CASES[NAMES.index(name)]
    out = tmp_path / 'plain.pth'
    convert_zero(folder / f'{name}.pth', out)
    content = torch.load(out, weights_only=True)
    assert content['meta']['classes'] == 'ab'
    model, _ = build(**case.get('model', {}))
    model.load_state_dict(content['state_dict'], strict=True)
    if 'bf16' in name:
        # The master weights: closer than what was computed with.
        near = torch.load(folder / f'{name}_weights.pth', weights_only=True)
        expected, tolerance = near['state_dict'], 2**-8
    else:
        expected, tolerance = plain(case, 3)[1], 1e-5
    for key, value in model.state_dict().items():
        assert value.dtype == expected[key].dtype
        assert torch.allclose(value, expected[key], tolerance, 1e-5), key
    assert not list(tmp_path.glob('.*'))


@pytest.mark.parametrize('name', SAVED)
def test_weights_alone_are_saved_as_a_plain_file(name, folder):
    content = torch.load(folder / f'{name}_weights.pth', weights_only=True)
    model, _ = build(**CASES[NAMES.index(name)].get('model', {}))
    model.load_state_dict(content['state_dict'], strict=True)


def test_no_half_done_folder_is_left(folder):
    assert not list(folder.glob('.*'))


class TestFit:
    """Which runs can go on from a folder."""

    @pytest.mark.parametrize(
        ('name', 'world_size', 'stage', 'message'),
        [
            ('stage 2', 1, 2, r'saved by 2 processes, and this run has 1: '),
            ('stage 3', 4, 3, r'saved by 2 processes, and this run has 4: '),
            ('stage 2', 2, 3, r'stage 1 or 2, and this run has stage 3: '),
            ('stage 3', 2, 0, r'stage 3, and this run has stage 0: '),
        ],
    )
    def test_refused(self, folder, name, world_size, stage, message):
        saved = ZeroFolder(folder / f'{name}.pth')
        with pytest.raises(ValueError, match=message) as error:
            saved.check_fit(world_size, stage)
        assert 'zero_to_fp32.py' in str(error.value)
        assert '\n' not in str(error.value)

    @pytest.mark.parametrize(
        ('name', 'world_size', 'stage'),
        [('stage 0', 7, 0), ('stage 1', 2, 2), ('stage 3', 2, 3)],
    )
    def test_accepted(self, folder, name, world_size, stage):
        ZeroFolder(folder / f'{name}.pth').check_fit(world_size, stage)


class TestDamage:
    @pytest.fixture
    def copied(self, folder, tmp_path):
        return Path(shutil.copytree(folder / 'stage 2.pth', tmp_path / 'x'))

    def test_missing_part(self, copied):
        next(copied.glob('*_optim_states.pt')).unlink()
        with pytest.raises(ValueError, match='parts of 1; copy it again'):
            ZeroFolder(copied)

    def test_cut_off(self, copied):
        part = next(copied.glob('*_optim_states.pt'))
        part.write_bytes(part.read_bytes()[:1000])
        with pytest.raises(ValueError, match=rf'{part}.*damaged'):
            ZeroFolder(copied)

    def test_code_of_others_is_not_run(self, copied):
        part = next(copied.glob('*_optim_states.pt'))
        with part.open('wb') as file:
            pickle.dump(Path('/'), file)
        with pytest.raises(ValueError, match=f'{part}'):
            ZeroFolder(copied)
        content = {'state_dict': {}, 'other': subprocess.Popen}
        torch.save(content, part)
        with pytest.raises(ValueError, match=r'refused.*\.Popen'):
            ZeroFolder(copied)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match='no such checkpoint'):
            ZeroFolder(tmp_path / 'none')
        with pytest.raises(ValueError, match=r'no \*_model_states'):
            ZeroFolder(tmp_path)

    def test_plain_file(self, trained):
        with pytest.raises(ValueError, match=r'a plain checkpoint.*load_from'):
            ZeroFolder(trained / 'iter_30.pth')


def test_an_interrupted_save_leaves_the_good_one(tmp_path):
    path = tmp_path / 'iter_1.pth'

    def write(text, stop=False):
        def writer(part):
            part.mkdir()
            (part / 'a').write_text(text)
            if stop:
                raise KeyboardInterrupt

        return writer

    save_zero(path, write('good'))
    with pytest.raises(KeyboardInterrupt):
        save_zero(path, write('half', stop=True))
    assert (path / 'a').read_text() == 'good'
    save_zero(path, write('new'))
    assert (path / 'a').read_text() == 'new'
    assert list(tmp_path.iterdir()) == [path]


def strategy(tmp_path, **kwargs):
    return ZeroStrategy(
        work_dir=str(tmp_path),
        env_kwargs=dict(launcher='none'),
        log_kwargs=dict(log_level='ERROR'),
        **kwargs,
    )


class TestSettings:
    @pytest.mark.parametrize(
        ('mine', 'wrapper', 'message'),
        [
            (
                {'gradient_clipping': 2.0},
                CLIP,
                'gradient_clipping=2.0 .* clip_grad.max_norm=0.02: set one',
            ),
            (
                {'config': {'gradient_accumulation_steps': 1}},
                ACCUMULATE,
                'steps=1 .* accumulative_counts=2: set one',
            ),
            ({}, {'clip_grad': {'max_norm': 1, 'norm_type': 1}}, '2-norm'),
            ({}, {'clip_grad': {'type': 'value'}}, '2-norm'),
            ({}, {'type': 'AmpOptimWrapper'}, 'strategy.bf16.enabled=True'),
            ({}, {'type': 'ApexOptimWrapper'}, 'does not go with ZeRO'),
        ],
    )
    def test_contradiction(self, tmp_path, mine, wrapper, message):
        zero = strategy(tmp_path, stage=1, **mine)
        model, _ = build()
        with pytest.raises(ValueError, match=message):
            zero.build_optim_wrapper(
                {'optimizer': OPTIMIZER, **wrapper}, model
            )

    @pytest.mark.parametrize(
        ('mine', 'message'),
        [
            ({'stage': 4}, 'stages 0 to 3'),
            ({'config': {'optimizer': {}}}, r'config.optimizer would be'),
            ({'config': {'scheduler': {}}}, r'config.scheduler would be'),
        ],
    )
    def test_without_effect(self, tmp_path, mine, message):
        with pytest.raises(ValueError, match=message):
            strategy(tmp_path, **mine)

    def test_batch_norm_in_half_precision(self, tmp_path):
        zero = strategy(tmp_path, stage=0, bf16={'enabled': True})
        model, _ = build()
        with pytest.raises(ValueError, match=r'BatchNorm.*torch_autocast'):
            zero.prepare(model, dispatch_kwargs={})

    def test_agreement(self, tmp_path):
        zero = strategy(
            tmp_path,
            config={'gradient_clipping': 0.02},
            gradient_accumulation_steps=2,
        )
        model, _ = build()
        zero.build_optim_wrapper(
            {'optimizer': OPTIMIZER, **CLIP, **ACCUMULATE}, model
        )
        assert zero.config['gradient_clipping'] == 0.02
        assert zero.config['gradient_accumulation_steps'] == 2


class TestTools:
    """Through configs, on one process without a launcher."""

    @pytest.fixture(scope='class')
    def work_dir(self, project, tmp_path_factory):
        """Four iterations from plain weights, saved as a folder."""
        work_dir = tmp_path_factory.mktemp('work')
        train(
            project / 'tiny.py',
            work_dir=str(work_dir),
            zero_stage=2,
            cfg_options={
                'load_from': str(project / 'trained' / 'iter_30.pth'),
                'train_cfg.max_iters': 4,
                'train_cfg.val_interval': 4,
                'default_hooks.checkpoint.interval': 2,
                'default_hooks.checkpoint.save_best': 'mIoU',
                'optim_wrapper.optimizer.lr': 0.0,
            },
        )
        leave_group()
        return work_dir

    def test_begins_with_plain_weights(self, trained, work_dir, tmp_path):
        """And keeps them: its learning rate is zero."""
        convert_zero(work_dir / 'iter_4.pth', tmp_path / 'x.pth')
        before = torch.load(trained / 'iter_30.pth')['state_dict']
        after = torch.load(tmp_path / 'x.pth')
        assert after['meta']['dataset_meta']['classes'][0] == 'dark'
        for key, value in before.items():
            assert torch.equal(after['state_dict'][key], value), key

    def test_tests_a_folder_a_file_and_the_best(
        self, project, trained, work_dir, tmp_path
    ):
        (best,) = work_dir.glob('best_*.pth')
        assert best.is_file()
        scores = [
            evaluate(project / 'tiny.py', str(path), work_dir=str(tmp_path))
            for path in (
                trained / 'iter_30.pth',
                work_dir / 'iter_4.pth',
                best,
            )
        ]
        assert scores[0] == scores[1] == scores[2]
        assert not list(tmp_path.glob('.*'))

    def test_goes_on(self, project, work_dir):
        train(
            project / 'tiny.py',
            work_dir=str(work_dir),
            zero_stage=1,
            resume=True,
            cfg_options={'train_cfg.max_iters': 6},
        )
        assert (work_dir / 'iter_6.pth').is_dir()
        assert (
            (work_dir / 'last_checkpoint').read_text().endswith('iter_6.pth')
        )

    def test_refuses_in_one_line(self, project, trained, work_dir, tmp_path):
        saved = str(work_dir / 'iter_4.pth')
        with pytest.raises(ValueError, match=r'as ZeRO saves.*--zero-stage'):
            train(project / 'tiny.py', str(tmp_path), resume=saved)
        with pytest.raises(ValueError, match=r'zero_to_fp32\.py'):
            train(
                project / 'tiny.py',
                str(tmp_path),
                zero_stage=1,
                cfg_options={'load_from': saved},
            )
        with pytest.raises(ValueError, match='a plain checkpoint'):
            train(
                project / 'tiny.py',
                str(tmp_path),
                zero_stage=1,
                resume=str(trained / 'iter_30.pth'),
            )
        with pytest.raises(ValueError, match=r'--amp.*strategy.bf16'):
            train(project / 'tiny.py', str(tmp_path), zero_stage=1, amp=True)

    def test_another_world_size(self, project, folder, tmp_path):
        with pytest.raises(ValueError, match=r'by 2 processes.*has 1'):
            train(
                project / 'tiny.py',
                str(tmp_path),
                zero_stage=2,
                resume=str(folder / 'stage 2.pth'),
            )


@pytest.mark.parametrize(
    ('stage', 'name', 'device', 'message'),
    [
        (0, 'offload_optimizer', 'cpu', "='cpu' is without effect in stage 0"),
        (2, 'offload_optimizer', 'nvme', 'in stage 2; set stage=3'),
        (2, 'offload_param', 'cpu', 'in stage 2; set stage=3'),
        (3, 'offload_param', 'nvme', 'say nvme_path'),
    ],
)
def test_offload_without_effect(tmp_path, stage, name, device, message):
    zero = {name: {'device': device}}
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(
            work_dir=str(tmp_path), stage=stage, zero_optimization=zero
        )


def test_nvme_without_what_it_needs(tmp_path, monkeypatch):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(
        AsyncIOBuilder, 'is_compatible', lambda self, verbose: False
    )
    offload = {'device': 'nvme', 'nvme_path': str(tmp_path)}
    with pytest.raises(ValueError, match=r'async_io, .* install .* libaio'):
        ZeroStrategy(
            work_dir=str(tmp_path),
            stage=3,
            zero_optimization={'offload_optimizer': offload},
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason='GPUs have fp16')
def test_fp16_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match=r'a cpu has no fp16; use bf16=dict'):
        ZeroStrategy(work_dir=str(tmp_path), stage=2, fp16={'enabled': True})


def test_missing_deepspeed_is_one_line(project, monkeypatch, tmp_path):
    find = 'infsa_seg.engine.zero_checkpoint.find_spec'
    monkeypatch.setattr(find, lambda name: None)
    with pytest.raises(ImportError, match=r"install 'infsa_seg\[deepspeed\]'"):
        train(project / 'tiny.py', str(tmp_path), zero_stage=1)


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_strategy_files(stage):
    path = REPO / 'configs' / '_base_' / 'strategies' / f'zero{stage}.py'
    cfg = load_config(path)
    assert isinstance(cfg, Config)
    assert cfg.strategy.type == 'ZeroStrategy'
    assert cfg.strategy.stage == stage
