# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Installed in every way that users install, in environments of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.config import Config
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infsa_seg import __version__, stack

REPO = Path(__file__).parents[1]
CONFIGS = {
    path.relative_to(REPO).as_posix()
    for path in (REPO / 'configs').rglob('*.py')
    if '_base_' not in path.parts
}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, and show what it said if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {'PYTHONWARNINGS': 'ignore'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    """A copy of the repository, as building leaves files behind."""
    folder = tmp_path_factory.mktemp('checkout') / 'infsa_seg'
    unwanted = shutil.ignore_patterns('.*_cache', '.git', '.venv', '.mim')
    ours = (
        *('infsa_seg', 'configs', 'tools', 'requirements', 'setup.py'),
        *('pyproject.toml', 'MANIFEST.in', 'model-index.yml', 'README.md'),
        *('LICENSE', 'CHANGELOG.md', 'requirements.txt'),
    )
    folder.mkdir()
    for name in ours:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name, ignore=unwanted)
        else:
            shutil.copy(REPO / name, folder)
    return folder


class Environment:
    """A fresh environment.

    Args:
        folder: Where it goes.
        parent: Packages that it sees too, so that nothing heavy is installed
            again.
    """

    def __init__(self, folder: Path, parent: Path | None):
        venv.create(folder, with_pip=parent is None)
        self.folder = folder
        self.python = folder / 'bin' / 'python'
        (self.packages,) = folder.glob('lib/*/site-packages')
        if parent is not None:
            (self.packages / 'parent.pth').write_text(f'{parent}\n')

    def pip_install(self, *words: str | Path, cwd: Path | None = None) -> None:
        """Install without a word, or fail with all of them."""
        pip = ('-m', 'pip', 'install', '--quiet')
        run(self.python, *pip, *words, cwd=cwd or self.folder)

    def run(self, *words: str) -> str:
        """Run Python, far from the checkout, and return its output."""
        return run(self.python, *words, cwd=self.folder)


def read_requirements(name: str) -> dict[str, Requirement]:
    lines = (REPO / 'requirements' / f'{name}.txt').read_text().splitlines()
    lines = [line.partition('#')[0] for line in lines]
    found = [Requirement(line) for line in lines if line.strip()]
    return {requirement.name: requirement for requirement in found}


class TestRequirements:
    def test_minimum_is_what_the_bounds_say(self):
        minimum = read_requirements('minimum')
        wanted = read_requirements('runtime') | read_requirements('mminstall')
        for name, requirement in wanted.items():
            for bound in requirement.specifier:
                if bound.operator == '>=':
                    (pin,) = minimum[name].specifier
                    assert pin.version.startswith(bound.version), name

    def test_minimum_can_work(self):
        minimum = read_requirements('minimum')
        for limit in stack.LIMITS:
            for name in set(stack.PROVIDERS[limit.module]) & set(minimum):
                (pin,) = minimum[name].specifier
                assert pin.version in SpecifierSet(limit.versions), name


@pytest.fixture(scope='module')
def models():
    """What the index lists."""
    index = yaml.safe_load((REPO / 'model-index.yml').read_text())
    return [
        model
        for name in index['Import']
        for model in yaml.safe_load((REPO / name).read_text())['Models']
    ]


class TestIndex:
    def test_every_config_is_listed(self, models):
        assert {model['Config'] for model in models} == CONFIGS
        for model in models:
            assert Path(model['Config']).stem == model['Name']

    def test_schedules_are_those_of_the_configs(self, models):
        for model in models:
            # Their results are of shorter runs, which docs/accuracy.md tells.
            if model['Name'].endswith('_camvid-480x360'):
                continue
            cfg = Config.fromfile(REPO / model['Config'])
            allowed = {
                'Epochs': [cfg.train_cfg.get('max_epochs')],
                'Iterations': [cfg.train_cfg.get('max_iters')],
                'Batch Size': [
                    cfg.train_dataloader.batch_size,
                    cfg.get('auto_scale_lr', {}).get('base_batch_size'),
                ],
            }
            for key in allowed.keys() & model['Metadata'].keys():
                told = model['Metadata'][key]
                assert told in allowed[key], (model['Name'], key)


@pytest.fixture(scope='module')
def wheel(checkout, tmp_path_factory):
    """Built as pip does from a source distribution: sdist, then wheel."""
    out = tmp_path_factory.mktemp('dist')
    program = (
        'from setuptools import build_meta\n'
        f'print(build_meta.build_sdist({str(out)!r}))\n'
    )
    run(sys.executable, '-c', program, cwd=checkout)
    (sdist,) = out.glob('*.tar.gz')
    shutil.unpack_archive(sdist, out / 'unpacked', filter='data')
    (source,) = (out / 'unpacked').iterdir()
    run(
        *(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--quiet'),
        *('--no-build-isolation', '--wheel-dir', out, source),
        cwd=out,
    )
    (wheel,) = out.glob('*.whl')
    return zipfile.ZipFile(wheel).namelist()


class TestBuild:
    def test_configs_and_tools_are_shipped(self, wheel):
        mim = {
            path.removeprefix('infsa_seg/.mim/')
            for path in wheel
            if path.startswith('infsa_seg/.mim/')
        }
        files = {'model-index.yml', 'configs/infvit/metafile.yml'}
        for folder in ('configs', 'tools'):
            files |= {
                path.relative_to(REPO).as_posix()
                for path in (REPO / folder).rglob('*.py')
            }
        assert mim >= files

    def test_nothing_else_is_shipped(self, wheel):
        top = {path.partition('/')[0] for path in wheel}
        assert top == {'infsa_seg', f'infsa_seg-{__version__}.dist-info'}
        assert not [path for path in wheel if '__pycache__' in path]


SEES_CONFIGS = """
import infsa_seg
from infsa_seg.apis import load_config
cfg = load_config('infsa_seg::infvit_seg_demo.py')
print(cfg.model.backbone.type, infsa_seg.__file__)
"""


# Two iterations of the demo.
SHORT = {
    'train_cfg.max_iters': 2,
    'train_cfg.val_interval': 2,
    'train_dataloader.num_workers': 0,
    'train_dataloader.persistent_workers': False,
    'val_dataloader.num_workers': 0,
    'val_dataloader.persistent_workers': False,
    'val_dataloader.dataset.num_scenes': 2,
    'test_dataloader.num_workers': 0,
    'test_dataloader.persistent_workers': False,
    'test_dataloader.dataset.num_scenes': 2,
}
TRAINS = f"""
from infsa_seg.apis import train
config = 'infsa_seg::infvit_seg_demo.py'
train(config, work_dir='work', cfg_options={SHORT})
print('trained')
"""


@pytest.fixture(scope='module')
def only_torch(tmp_path_factory):
    """An environment with nothing but the build that ``make`` was given."""
    version = torch.__version__.partition('+')[0]
    environment = Environment(tmp_path_factory.mktemp('torch'), parent=None)
    environment.pip_install(os.environ.get('TORCH', f'torch=={version}'))
    return environment.packages


RUNNING = Path(sysconfig.get_path('purelib'))
AS_IT_IS = ('--no-deps', '--no-build-isolation')


@pytest.mark.slow
class TestInstallation:
    @pytest.mark.parametrize('editable', [False, True])
    def test_installed(self, checkout, tmp_path, editable):
        pytest.importorskip('mim')
        environment = Environment(tmp_path / 'env', parent=RUNNING)
        option = ['--editable'] if editable else []
        environment.pip_install(*AS_IT_IS, *option, '.', cwd=checkout)
        backbone, file = environment.run('-c', SEES_CONFIGS).split()[-2:]
        assert backbone == 'InfViT'
        assert Path(file).is_relative_to(checkout) == editable
        assert 'infsa-seg' in environment.run('-m', 'mim', 'list')

    def test_nothing_undeclared_is_needed(
        self, checkout, tmp_path, only_torch
    ):
        environment = Environment(tmp_path / 'env', parent=only_torch)
        environment.pip_install('.[mim]', cwd=checkout)
        assert 'trained' in environment.run('-c', SEES_CONFIGS + TRAINS)

    def test_the_forks_work(self, checkout, tmp_path, only_torch):
        """The ``onedl-*`` packages, which have the same import names."""
        environment = Environment(tmp_path / 'env', parent=only_torch)
        forks = ('onedl-mmengine', 'onedl-mmcv', 'onedl-mmsegmentation')
        environment.pip_install(*forks)
        environment.pip_install('--no-deps', '.', cwd=checkout)
        assert 'trained' in environment.run('-c', SEES_CONFIGS + TRAINS)

    def test_deepspeed_beside(self, checkout, tmp_path):
        environment = Environment(tmp_path / 'env', parent=RUNNING)
        environment.pip_install(*AS_IT_IS, '.', cwd=checkout)
        environment.pip_install('-r', REPO / 'requirements' / 'zero.txt')
        registers = (
            'from mmengine._strategy import deepspeed\n'
            'print(deepspeed.register_deepspeed_optimizers())\n'
        )
        assert 'FusedAdam' in environment.run('-c', TRAINS + registers)


mim_commands = pytest.mark.skipif(
    not (REPO / 'infsa_seg' / '.mim').exists(),
    reason='infsa_seg is not installed: pip install -e .',
)


@mim_commands
class TestMim:
    """openmim, on the package as installed in the running environment."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        pytest.importorskip('mim')
        self.folder = tmp_path

    def mim(self, *words):
        return run(sys.executable, '-m', 'mim', *words, cwd=self.folder)

    def test_list(self):
        assert 'infsa-seg' in self.mim('list')

    def test_search(self):
        found = self.mim('search', 'infsa_seg', '--valid-config')
        for config in CONFIGS:
            assert Path(config).stem in found

    def test_download_config_only(self):
        name = 'infvit_seg_demo'
        options = ('--config', name, '--dest', self.folder)
        self.mim('download', 'infsa_seg', *options)
        cfg = Config.fromfile(self.folder / f'{name}.py')
        assert cfg.model.backbone.type == 'InfViT'

    def test_train_then_test(self):
        demo = ('infsa_seg', 'infvit_seg_demo.py')
        options = [f'{key}={value}' for key, value in SHORT.items()]
        options = (
            '--work-dir',
            self.folder / 'work',
            '--cfg-options',
            *options,
        )
        self.mim('train', *demo, *options)
        (weights,) = self.folder.glob('work/iter_2.pth')
        assert 'mIoU' in self.mim(
            'test', *demo, '--checkpoint', weights, *options
        )
