# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the package is, and what it needs; tools are set in pyproject.toml."""

import runpy
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent


class BuildWithMim(build_py):
    """Ship what openmim and ``infsa_seg::`` look for in ``infsa_seg/.mim``.

    Copied into what is built; linked where the package is used in place, so
    that an edited config takes effect at once.
    """

    def run(self):
        """Build the package, then add ``.mim``."""
        super().run()
        in_place = self.editable_mode
        parent = ROOT if in_place else Path(self.build_lib)
        mim = parent / 'infsa_seg' / '.mim'
        shutil.rmtree(mim, ignore_errors=True)
        mim.mkdir(parents=True)
        for name in ('configs', 'tools', 'model-index.yml'):
            if in_place:
                (mim / name).symlink_to(ROOT / name)
            elif (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, mim / name)
            else:
                shutil.copy(ROOT / name, mim)


class EggInfo(egg_info):
    """Lead openmim to a package that is used in place.

    It joins the folder of the metadata and the first line of
    ``top_level.txt``; a full path takes it to the checkout.
    """

    def run(self):
        """Write the metadata, then name the checkout."""
        super().run()
        if 'editable_wheel' in self.distribution.commands:
            top_level = Path(self.egg_info, 'top_level.txt')
            top_level.write_text(f'{ROOT / "infsa_seg"}\ninfsa_seg\n')


def read_requirements(name):
    """Read ``requirements/NAME.txt``, without the reasons given there."""
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    lines = (line.partition('#')[0].strip() for line in lines)
    return [line for line in lines if line and not line.startswith('-r ')]


extras = {
    'deepspeed': read_requirements('zero'),
    'pretrain': read_requirements('pretrain'),
    'raster': read_requirements('raster'),
    'tests': read_requirements('tests'),
}
extras['all'] = [line for lines in extras.values() for line in lines]
# Not among `all`: it would overwrite a compiled mmcv.
extras['mim'] = read_requirements('mminstall')

setup(
    name='infsa_seg',
    version=runpy.run_path(ROOT / 'infsa_seg' / 'version.py')['__version__'],
    description='Linear-time attention for segmentation of very large images',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=find_packages(include=['infsa_seg', 'infsa_seg.*']),
    install_requires=read_requirements('runtime'),
    extras_require=extras,
    cmdclass={'build_py': BuildWithMim, 'egg_info': EggInfo},
    zip_safe=False,
)
