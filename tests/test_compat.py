# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pickle
import subprocess
import sys
from pathlib import Path

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import CheckpointLoader, Runner
from mmengine.utils.dl_utils import mmcv_full_available
from torch import nn

from infsa_seg import compat

REPO = Path(__file__).parents[1]


def run(program: str) -> subprocess.CompletedProcess:
    """Run a program in a fresh interpreter, where nothing is repaired yet."""
    return subprocess.run(
        [sys.executable, '-c', program],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )


def test_missing_library_stops_the_import_in_one_line():
    done = run(
        'import sys\n'
        'from importlib import metadata\n'
        'version = metadata.version\n'
        'def no_ftfy(name):\n'
        "    if name == 'ftfy':\n"
        '        raise metadata.PackageNotFoundError\n'
        '    return version(name)\n'
        'metadata.version = no_ftfy\n'
        "sys.modules['ftfy'] = None\n"
        'try:\n    import infsa_seg\n'
        'except ImportError as error:\n    print(error)\n'
    )
    assert done.stdout.splitlines() == [
        'infsa_seg needs ftfy, which is not installed: pip install "ftfy"'
    ]


COMPILED = any(Path(mmcv.__file__).parent.glob('_ext*.so'))


class TestMmcvExt:
    @pytest.mark.skipif(COMPILED, reason='the compiled mmcv is installed')
    def test_operators_name_themselves(self):
        from mmcv.ops import nms

        boxes = torch.tensor([[0.0, 0, 1, 1]])
        with pytest.raises(NotImplementedError, match='nms is an operator'):
            nms(boxes, torch.ones(1), 0.5)

    def test_mmengine_is_not_misled(self):
        assert mmcv_full_available() == COMPILED

    def test_a_compiled_one_is_left_alone(self):
        done = run(
            'import sys\n'
            'from importlib.machinery import ModuleSpec\n'
            'class Compiled:\n'
            '    def find_spec(self, name, path=None, target=None):\n'
            "        if name == 'mmcv._ext':\n"
            '            return ModuleSpec(name, self)\n'
            '    def create_module(self, spec): pass\n'
            '    def exec_module(self, module):\n'
            '        module.__getattr__ = lambda name: f"compiled {name}"\n'
            'sys.meta_path.insert(0, Compiled())\n'
            'import infsa_seg\n'
            'from mmcv.ops.nms import ext_module\n'
            'print(ext_module.nms)\n'
        )
        # DeepSpeed, where it is installed, says which device it has found.
        assert done.stdout.splitlines()[-1] == 'compiled nms', done.stderr


class TestDeepSpeed:
    """A stand-in for DeepSpeed: the real one is not in every environment."""

    @pytest.fixture
    def onebit(self, tmp_path, monkeypatch):
        """Put a DeepSpeed, with or without 1-bit optimizers, on the path."""
        name = 'deepspeed.runtime.fp16.onebit'

        def build(with_onebit):
            folder = tmp_path.joinpath(*name.split('.'))
            package = folder if with_onebit else folder.parent
            package.mkdir(parents=True)
            # Goes before one that is installed, and may be imported.
            (tmp_path / 'deepspeed' / '__init__.py').touch()
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.delitem(sys.modules, 'deepspeed', raising=False)
            monkeypatch.delitem(sys.modules, name, raising=False)
            compat.stand_in_for_onebit()
            stand_in = sys.modules.get(name)
            monkeypatch.delitem(sys.modules, name, raising=False)
            return stand_in

        return build

    def test_optimizers_can_be_registered_but_not_used(self, onebit):
        stand_in = onebit(with_onebit=False)
        for name in ('OnebitAdam', 'OnebitLamb', 'ZeroOneAdam'):
            optimizer = getattr(stand_in, name)
            assert optimizer.__name__ == name
            with pytest.raises(NotImplementedError, match=name):
                optimizer([], lr=1.0)

    def test_one_that_has_them_is_left_alone(self, onebit):
        assert onebit(with_onebit=True) is None


class TestConfigs:
    def inherit(self, base, tmp_path):
        config = tmp_path / 'config.py'
        config.write_text(f'_base_ = {base!r}\n')
        return Config.fromfile(config)

    def test_from_mmsegmentation(self, tmp_path):
        base = 'mmseg::_base_/schedules/schedule_20k.py'
        assert self.inherit(base, tmp_path).train_cfg.max_iters == 20000

    @pytest.mark.skipif(
        not (REPO / 'infsa_seg' / '.mim').exists(),
        reason='infsa_seg is not installed: pip install -e .',
    )
    @pytest.mark.parametrize(
        'name',
        [
            'infvit_seg_demo.py',
            'infvit/infvit-tiny_neumann_camvid-480x360.py',
        ],
    )
    def test_from_ours(self, tmp_path, name):
        cfg = self.inherit(f'infsa_seg::{name}', tmp_path)
        assert cfg.model.backbone.type == 'InfViT'
        # The models stand in mmsegmentation's registry, not in one of ours.
        assert '_scope_' not in cfg.model


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x, mode='tensor'):
        return {'loss': self.layers(torch.stack(x)).square().mean()}

    def val_step(self, data):
        return list(data['x'])


class Score(BaseMetric):
    """Returns a numpy number, as mmsegmentation's ``IoUMetric`` does."""

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {'mIoU': np.float32(len(results))}


SCHEDULERS = {
    'poly': {'type': 'PolyLR', 'by_epoch': False, 'end': 4},
    'cosine': {'type': 'CosineAnnealingLR', 'by_epoch': False, 'T_max': 4},
    'one cycle': {
        'type': 'OneCycleLR',
        'by_epoch': False,
        'eta_max': 0.1,
        'total_steps': 8,
    },
    'plateau': {'type': 'ReduceOnPlateauLR', 'monitor': 'mIoU'},
}


def train(work_dir: Path, scheduler: dict, epochs: int, resume: bool = False):
    loader = {
        'dataset': [{'x': torch.randn(2)} for _ in range(8)],
        'batch_size': 4,
        'num_workers': 0,
        'sampler': {'type': 'DefaultSampler', 'shuffle': True},
    }
    runner = Runner(
        model=Net(),
        work_dir=str(work_dir),
        train_dataloader=loader,
        train_cfg={'by_epoch': True, 'max_epochs': epochs},
        val_dataloader=loader,
        val_cfg={},
        val_evaluator={'type': Score},
        optim_wrapper={'optimizer': {'type': 'AdamW', 'lr': 0.01}},
        param_scheduler=scheduler,
        default_hooks={
            'logger': {'type': 'LoggerHook', 'interval': 1},
            'checkpoint': {'type': 'CheckpointHook', 'save_best': 'mIoU'},
        },
        custom_hooks=[{'type': 'EMAHook'}],
        resume=resume,
        experiment_name=f'{work_dir.name}-{resume}',
        log_level='ERROR',
    )
    runner.train()
    return runner


class TestCheckpoints:
    @pytest.mark.parametrize('scheduler', SCHEDULERS)
    def test_mmengine_resumes_its_own(self, tmp_path, scheduler):
        train(tmp_path, SCHEDULERS[scheduler], epochs=2)
        for file in tmp_path.glob('*.pth'):
            torch.load(file, weights_only=True)
        runner = train(tmp_path, SCHEDULERS[scheduler], epochs=4, resume=True)
        assert runner.iter == 8
        # The numpy numbers are what needs the allow-list.
        hub = runner.message_hub
        assert isinstance(hub.get_info('best_score'), np.float32)
        assert len(hub.get_scalar('train/loss').data[0]) == 8

    @pytest.mark.parametrize('core', ['core', '_core'])
    def test_either_numpy_reads_the_other(self, tmp_path, core):
        values = {'scalar': np.float64(2), 'array': np.arange(3)}
        ours = np.empty(0).__reduce__()[0].__module__
        data = pickle.dumps(values, protocol=2)
        data = data.replace(ours.encode(), f'numpy.{core}.multiarray'.encode())
        loaded = load_pickled(tmp_path, data)
        assert loaded['scalar'] == 2
        assert loaded['array'].tolist() == [0, 1, 2]

    def test_code_is_refused_and_not_run(self, tmp_path):
        witness = tmp_path / 'witness'

        class Attack:
            def __reduce__(self):
                return Path.touch, (witness,)

        self.refuses(tmp_path, {'state_dict': {}, 'meta': Attack()})
        assert not witness.exists()

    def test_foreign_class_is_refused(self, tmp_path):
        self.refuses(tmp_path, {'state_dict': {}, 'meta': Net()})

    def test_getattr_reaches_nothing_else(self, tmp_path):
        class Reach:
            def __reduce__(self):
                return getattr, (np.ndarray, 'tofile')

        self.refuses(tmp_path, {'state_dict': {}, 'meta': Reach()})

    def test_history_keeps_its_statistics(self, tmp_path):
        file = tmp_path / 'history.pth'
        torch.save(HistoryBuffer([1.0, 3.0], [1, 1]), file)
        assert torch.load(file, weights_only=True).statistics('mean') == 2

    def refuses(self, tmp_path, checkpoint):
        file = tmp_path / 'foreign.pth'
        torch.save(checkpoint, file)
        with pytest.raises(pickle.UnpicklingError):
            CheckpointLoader.load_checkpoint(str(file))

    def test_a_fork_that_falls_back_is_stopped(self, tmp_path, monkeypatch):
        """onedl-mmengine loads by a function of its own, which is unsafe."""
        from mmengine.runner import checkpoint

        monkeypatch.setattr(
            checkpoint, '_safe_torch_load', None, raising=False
        )
        compat.load_safely_only()
        file = tmp_path / 'foreign.pth'
        torch.save(Net(), file)
        with pytest.raises(pickle.UnpicklingError):
            checkpoint._safe_torch_load(str(file), map_location='cpu')


def load_pickled(folder: Path, data: bytes):
    """Load pickled bytes as the content of a file of ``torch.save``."""

    class Verbatim(pickle.Pickler):
        def __init__(self, file, protocol):
            self.write = file.write

        def dump(self, value):
            self.write(data)

    module = type('', (), {'Pickler': Verbatim})
    torch.save(None, folder / 'file.pth', pickle_module=module)
    return torch.load(folder / 'file.pth', weights_only=True)


def test_apply_runs_once():
    before = torch.serialization.get_safe_globals()
    compat.apply()
    assert torch.serialization.get_safe_globals() == before
