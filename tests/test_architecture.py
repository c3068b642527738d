# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The import ladder, as a table, held against the code.

A rung imports what stands lower, never sideways or up; what it may import
from other projects is listed too. Libraries that not every user needs are
imported inside functions.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = 'infsa_seg'


class Rung(NamedTuple):
    """What a file or folder may import beside itself and Python's own."""

    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    # Inside functions only.
    on_use: tuple[str, ...] = ()


OPENMMLAB = ('mmcv', 'mmengine', 'mmseg')
READERS = (
    *('rasterio', 'openslide', 'tifffile', 'imagecodecs'),
    *('shapely', 'pyogrio'),
)
OPTIONAL = (*READERS, 'deepspeed', 'kornia')

LADDER = {
    'version': Rung(),
    'type_hints': Rung(),
    'stack': Rung(theirs=('packaging',)),
    'compat': Rung(
        ours=('stack',), on_use=('mmengine', 'numpy', 'torch', 'deepspeed')
    ),
    'ops': Rung(theirs=('torch',)),
    'raster': Rung(theirs=('numpy',), on_use=('cv2', *READERS)),
    'layers': Rung(ours=('ops',), theirs=('torch',)),
    'models': Rung(
        ours=('ops', 'layers', 'compat', 'type_hints'),
        theirs=('torch', *OPENMMLAB),
    ),
    # Where mmsegmentation too decides how a model runs over an image.
    'models.segmentors': Rung(
        ours=('execution', 'models.utils', 'compat', 'type_hints'),
        theirs=('torch', *OPENMMLAB),
    ),
    'execution': Rung(
        ours=('ops', 'layers.protocol', 'compat', 'type_hints'),
        theirs=('torch', 'numpy'),
    ),
    'datasets': Rung(
        ours=('raster', 'ops.rows', 'compat', 'type_hints'),
        theirs=('torch', 'numpy', *OPENMMLAB),
        on_use=('kornia',),
    ),
    'evaluation': Rung(
        ours=('ops.state', 'compat', 'type_hints'),
        theirs=('torch', 'numpy', *OPENMMLAB),
    ),
    'engine': Rung(
        ours=(
            *('ops', 'layers.protocol', 'models', 'execution'),
            *('compat', 'type_hints'),
        ),
        theirs=('torch', 'numpy', *OPENMMLAB),
        on_use=('deepspeed',),
    ),
    'apis': Rung(
        ours=(
            '',
            *('ops', 'raster', 'layers', 'models', 'execution', 'datasets'),
            *('evaluation', 'engine', 'compat', 'type_hints', 'version'),
        ),
        theirs=('torch', 'numpy', 'cv2', 'PIL', 'rich', *OPENMMLAB),
    ),
    # The package itself: checks, repairs and registers.
    '': Rung(
        ours=(
            *('compat', 'version', 'layers.convert'),
            *('models', 'datasets', 'engine'),
        )
    ),
    # Arguments and exit status only.
    'tools': Rung(ours=('apis',)),
    # Questions about the operators themselves.
    'tools.dataset_converters': Rung(
        ours=('raster', 'apis'),
        theirs=('numpy',),
        on_use=('rasterio', 'shapely', 'pyogrio'),
    ),
    'tools.analysis': Rung(
        ours=('ops', 'raster', 'layers', 'engine', 'apis'),
        theirs=('torch', 'rich', 'PIL'),
    ),
}


def imports(source: str, module: str) -> Iterator[tuple[list[str], bool]]:
    """Yield every import, wherever it stands, as dotted names.

    Args:
        source: Text of the file.
        module: Dotted name of the file; a package's ends in ``.__init__``.

    Yields:
        The names that one import may stand for (``from a import b`` is ``a``
        and may be ``a.b``), and whether it stands inside a function.
    """
    package = module.rpartition('.')[0]
    pending = [(ast.parse(source), False)]
    while pending:
        node, on_use = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield [alias.name], on_use
        elif isinstance(node, ast.ImportFrom):
            name = '.' * node.level + (node.module or '')
            name = resolve_name(name, package)
            for alias in node.names:
                yield [name, f'{name}.{alias.name}'], on_use
        on_use |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        pending += [(child, on_use) for child in ast.iter_child_nodes(node)]


def violations(source: str, module: str) -> list[str]:
    """Hold one file against the ladder.

    Args:
        source: Text of the file.
        module: Dotted name of the file; a package's ends in ``.__init__``.

    Returns:
        One line for every import that its rung does not allow.
    """
    name = module.removeprefix(f'{PACKAGE}.').removesuffix('__init__')
    rung_name = name
    while rung_name and rung_name not in LADDER:
        rung_name = rung_name.rpartition('.')[0]
    if not rung_name and name:
        return [f'{module} stands on no rung of the ladder']
    rung = LADDER[rung_name]
    return [
        f'{module} imports {targets[-1]}'
        for targets, on_use in imports(source, module)
        if not any(_allows(rung, rung_name, name, on_use) for name in targets)
    ]


def _allows(rung: Rung, rung_name: str, target: str, on_use: bool) -> bool:
    top = target.partition('.')[0]
    if top != PACKAGE:
        foreign = rung.theirs + (rung.on_use if on_use else ())
        return top in sys.stdlib_module_names or top in foreign
    name = target.removeprefix(PACKAGE).removeprefix('.')
    return any(
        name == allowed or (allowed and name.startswith(f'{allowed}.'))
        for allowed in (rung_name, *rung.ours)
    )


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the package's and the tools' files with their dotted names."""
    for folder in (PACKAGE, 'tools'):
        for path in sorted((ROOT / folder).rglob('*.py')):
            if '.mim' not in path.parts:
                name = path.relative_to(ROOT).with_suffix('')
                yield path, '.'.join(name.parts)


def test_the_code_keeps_to_the_ladder():
    found = [
        line
        for path, module in sources()
        for line in violations(path.read_text(encoding='utf-8'), module)
    ]
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('ops.linear', 'import numpy'),
        ('ops.linear', 'from ..layers import attention'),
        ('ops.__init__', 'from infsa_seg import layers'),
        ('ops.linear', 'from infsa_seg.layers.block import Block'),
        ('layers.block', 'import mmengine.model'),
        ('layers.block', 'def f():\n    from ..models import InfViT'),
        ('models.backbones.infvit', 'from ...execution import whole'),
        ('models.utils.__init__', 'from ...engine import hooks'),
        ('execution.whole', 'from ..layers.block import Block'),
        ('execution.whole', 'from ..layers import block'),
        ('datasets.scenes', 'from ..ops import InfSA'),
        ('raster.geotiff', 'import rasterio'),
        (
            'raster.geotiff',
            'from typing import TYPE_CHECKING\n'
            'if TYPE_CHECKING:\n    from ..models import InfViT',
        ),
        ('engine.zero', 'try:\n    import deepspeed\nexcept ImportError: 0'),
        ('helpers', 'import os'),
    ],
)
def test_a_planted_violation_is_found(module, source):
    assert len(violations(source, f'{PACKAGE}.{module}')) == 1


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('ops.linear', 'import math, torch.nn\nfrom . import state'),
        ('execution.whole', 'from ..layers import protocol'),
        ('execution.whole', 'from infsa_seg.layers.protocol import LocalOp'),
        ('raster.geotiff', 'def f():\n    import rasterio.windows'),
        (
            'engine.zero',
            'class A:\n    def f(self):\n        import deepspeed',
        ),
        ('__init__', 'from . import compat, models'),
    ],
)
def test_what_the_ladder_allows_is_not_reported(module, source):
    assert violations(source, f'{PACKAGE}.{module}') == []


def test_every_module_imports_without_optional_libraries():
    modules = [
        module.removesuffix('.__init__')
        for _, module in sources()
        if module.startswith(PACKAGE)
    ]
    program = (
        'import importlib, sys\n'
        # Python's own way to say that there is no such module.
        f'sys.modules.update(dict.fromkeys({OPTIONAL}))\n'
        f'for module in {modules}:\n'
        '    importlib.import_module(module)\n'
    )
    # One process does: whichever comes first, the package comes before it.
    done = subprocess.run(
        [sys.executable, '-c', program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_file_says_whose_it_is():
    line = '# Copyright (c) infsa_seg contributors. '
    line += 'SPDX-License-Identifier: Apache-2.0\n'
    files = [ROOT / 'setup.py']
    for folder in (PACKAGE, 'benchmarks', 'configs', 'tests', 'tools'):
        files += (ROOT / folder).rglob('*.py')
    texts = {str(path): path.read_text(encoding='utf-8') for path in files}
    bare = [
        p for p, text in texts.items() if text and not text.startswith(line)
    ]
    assert not bare, '\n'.join(bare)
