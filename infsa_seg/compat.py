# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Every repair of the stack below us, and the versions it can be built from.

:func:`apply` runs at ``import infsa_seg``. Each repair does nothing where
upstream is healthy, and its docstring names the version it was seen with and
when it can go.
"""

import logging
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet


class IncompatibleError(ImportError):
    """An installed, or missing, distribution that we cannot work with."""


class Limit(NamedTuple):
    """A module that must be importable, and the versions that can work."""

    module: str
    # The distributions that provide the module, whichever is installed.
    distributions: tuple[str, ...]
    versions: str
    reason: str
    install: str
    # The limit holds only where this distribution is installed too.
    beside: str | None = None


LIMITS = (
    Limit(
        'torch',
        ('torch',),
        '>=2.4',
        'older ones cannot load checkpoints safely',
        'torch>=2.4',
    ),
    Limit(
        'mmengine',
        ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
        '>=0.10.0',
        'its FlexibleRunner came with 0.10',
        'mmengine>=0.10.7,<1',
    ),
    Limit(
        'mmcv',
        ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
        '>=2.0.0',
        'mmsegmentation 1 is written for mmcv 2',
        'mmcv-lite==2.1.0',
    ),
    Limit(
        'mmcv',
        ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
        '<2.2.0',
        'mmsegmentation 1.2.2 refuses newer ones',
        'mmcv-lite==2.1.0',
        beside='mmsegmentation',
    ),
    Limit(
        'mmseg',
        ('mmsegmentation', 'onedl-mmsegmentation'),
        '>=1.0.0',
        'older ones have no registry of mmengine',
        'mmsegmentation>=1.2.2,<2',
    ),
    Limit('ftfy', ('ftfy',), '', 'mmsegmentation imports it', 'ftfy'),
    Limit('regex', ('regex',), '', 'mmsegmentation imports it', 'regex'),
)

# What the test suite was run with; others get a warning and a try.
TESTED = {
    'torch': '>=2.13,<2.14',
    'mmengine': '>=0.10.7,<0.11',
    'onedl-mmengine': '>=0.10.12,<0.11',
    'mmcv-lite': '>=2.1.0,<2.2',
    'mmcv': '>=2.1.0,<2.2',
    'onedl-mmcv': '>=2.3.6,<2.4',
    'mmsegmentation': '>=1.2.2,<1.3',
    'onedl-mmsegmentation': '>=1.4.2,<1.5',
}


def apply() -> None:
    """Check the versions, then put every repair in place. Idempotent.

    Raises:
        IncompatibleError: Something needed is missing, or its version is
            known not to work; the message says what to install.
    """
    check_versions()
    stand_in_for_mmcv_ext()
    stand_in_for_onebit()
    allow_checkpoint_types()


def check_versions() -> None:
    """Refuse what cannot work, warn in one line of what was not tested.

    Raises:
        IncompatibleError: See :data:`LIMITS`.
    """
    for limit in LIMITS:
        if limit.beside is None or _version(limit.beside):
            _check_limit(limit)
    untested = [
        f'{name} {_version(name)} (tested: {versions})'
        for name, versions in TESTED.items()
        if _version(name) and not _within(_version(name), versions)
    ]
    if untested:
        logging.getLogger(__package__).warning(
            'infsa_seg is untested with %s', ', '.join(untested)
        )


def _check_limit(limit: Limit) -> None:
    for name in limit.distributions:
        version = _version(name)
        if version is None:
            continue
        if not _within(version, limit.versions):
            raise IncompatibleError(
                f'infsa_seg cannot work with {name} {version} '
                f'({limit.reason}): pip install "{limit.install}"'
            )
        return
    # A source checkout on the path has no metadata, and no version to check.
    if find_spec(limit.module) is None:
        raise IncompatibleError(
            f'infsa_seg needs {limit.module}, which is not installed: '
            f'pip install "{limit.install}"'
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def stand_in_for_mmcv_ext() -> None:
    """Let ``mmseg.models`` import where mmcv has no compiled operators.

    Seen with mmsegmentation 1.2.2, which imports ``mmcv.ops`` for heads that
    few use, on mmcv-lite 2.1.0. Can go when mmsegmentation imports them on
    use. A compiled ``mmcv._ext`` is left alone. The stand-in has no loader,
    so that ``mmengine.utils.dl_utils.mmcv_full_available`` still says no.
    """
    name = 'mmcv._ext'
    if find_spec(name) is not None:
        return
    stand_in = ModuleType(name, 'Stand-in for the operators that mmcv lacks.')
    stand_in.__spec__ = ModuleSpec(name, loader=None)
    stand_in.__getattr__ = _missing_op  # type: ignore[method-assign]
    sys.modules[name] = stand_in


def _missing_op(name: str) -> Any:
    if name.startswith('__'):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f'{name} is an operator of the compiled mmcv, and mmcv-lite is '
            'installed: pip uninstall mmcv-lite, then pip install mmcv==2.1.0'
        )

    return missing


def stand_in_for_onebit() -> None:
    """Let mmengine import beside a DeepSpeed without 1-bit optimizers.

    Seen with mmengine 0.10.7 and onedl-mmengine 0.10.12, which import
    ``deepspeed.runtime.fp16.onebit`` as soon as DeepSpeed is installed;
    DeepSpeed 0.19.8 has it no more. Can go when mmengine stops doing so.
    """
    deepspeed = find_spec('deepspeed')
    if deepspeed is None:
        return
    # Looked up as a file: importing DeepSpeed to ask takes seconds.
    (root,) = deepspeed.submodule_search_locations or ('',)
    if Path(root, 'runtime', 'fp16', 'onebit').is_dir():
        return
    stand_in = ModuleType('deepspeed.runtime.fp16.onebit')
    for name in ('OnebitAdam', 'OnebitLamb', 'ZeroOneAdam'):
        setattr(stand_in, name, type(name, (_MissingOptimizer,), {}))
    sys.modules[stand_in.__name__] = stand_in


class _MissingOptimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f'{type(self).__name__} is not in the installed DeepSpeed: '
            'choose another optimizer, for instance AdamW'
        )


def allow_checkpoint_types() -> None:
    """Let ``torch.load(weights_only=True)`` read mmengine's checkpoints.

    Seen with mmengine 0.10.7 and torch 2.6 or newer, whose default that is:
    beside tensors a checkpoint holds the log's history and numpy numbers.
    Nothing else is allowed, so a foreign pickle is still refused. Can go when
    mmengine saves plain types.
    """
    import numpy as np
    import torch
    from mmengine.logging import HistoryBuffer

    # Taken from the arrays themselves, since their modules have moved: both
    # names are allowed, so that either numpy reads what the other one saved.
    rebuilders = {
        '_reconstruct': np.empty(0).__reduce__()[0],
        'scalar': np.float64(0).__reduce__()[0],
    }
    numbers = (np.bool_, np.uint8, np.int64, np.float32, np.float64)
    torch.serialization.add_safe_globals(
        [
            HistoryBuffer,
            np.ndarray,
            np.dtype,
            *(type(np.dtype(number)) for number in numbers),
            *(
                (function, f'numpy.{core}.multiarray.{name}')
                for core in ('core', '_core')
                for name, function in rebuilders.items()
            ),
        ]
    )
