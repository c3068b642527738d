# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Every repair of the stack below us, and the versions it can be built from.

:func:`apply` runs at ``import infsa_seg``. Each repair does nothing where
upstream is healthy, and its docstring names the version it was seen with and
when it can go.
"""

import logging
import sys
from functools import cache, partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet


class IncompatibleError(ImportError):
    """An installed, or missing, distribution that we cannot work with."""


class Limit(NamedTuple):
    """The versions of a module that can work, and why others cannot."""

    module: str
    versions: str
    reason: str
    install: str
    # The limit holds only where this distribution is installed.
    beside: str | None = None


# Everything that must be importable, by the distributions that provide it.
PROVIDERS = {
    'torch': ('torch',),
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'ftfy': ('ftfy',),
    'regex': ('regex',),
}

LIMITS = (
    Limit(
        'torch',
        '>=2.6',
        'checkpoints cannot be loaded safely, CVE-2025-32434',
        'torch>=2.6',
    ),
    Limit('mmengine', '>=0.10', 'written for 0.10', 'mmengine>=0.10.7,<1'),
    Limit('mmcv', '>=2', 'mmsegmentation 1 needs it', 'mmcv-lite==2.1.0'),
    Limit(
        'mmcv',
        '<2.2',
        'mmsegmentation refuses it',
        'mmcv-lite==2.1.0',
        beside='mmsegmentation',
    ),
    Limit('mmseg', '>=1', 'written for 1.2', 'mmsegmentation>=1.2.2,<2'),
    # mmsegmentation imports both, and declares neither.
    Limit('ftfy', '', 'mmsegmentation imports it', 'ftfy'),
    Limit('regex', '', 'mmsegmentation imports it', 'regex'),
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


@cache
def apply() -> None:
    """Check the versions, then put every repair in place, once.

    Raises:
        IncompatibleError: Something needed is missing, or its version is
            known not to work; the message says what to install.
    """
    check_versions()
    stand_in_for_mmcv_ext()
    stand_in_for_onebit()
    allow_checkpoint_types()
    load_safely_only()


def check_versions() -> None:
    """Refuse what cannot work, warn in one line of what was not tested.

    Raises:
        IncompatibleError: See :data:`LIMITS`.
    """
    installed = {
        name: version
        for names in PROVIDERS.values()
        for name in names
        if (version := _version(name)) is not None
    }
    for limit in LIMITS:
        _check(limit, installed)
    untested = [
        f'{name} {version} (tested: {TESTED[name]})'
        for name, version in installed.items()
        if name in TESTED and not _within(version, TESTED[name])
    ]
    if untested:
        logging.getLogger(__package__).warning(
            'infsa_seg is untested with %s', ', '.join(untested)
        )


def _check(limit: Limit, installed: dict[str, str]) -> None:
    if limit.beside is not None and limit.beside not in installed:
        return
    names = [name for name in PROVIDERS[limit.module] if name in installed]
    for name in names:
        if not _within(installed[name], limit.versions):
            raise IncompatibleError(
                f'infsa_seg cannot work with {name} {installed[name]} '
                f'({limit.reason}): pip install "{limit.install}"'
            )
    # A source checkout on the path has no metadata, so no version to check.
    if not names and find_spec(limit.module) is None:
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
    """Let mmengine use a DeepSpeed that has no 1-bit optimizers.

    Seen with mmengine 0.10.7 and onedl-mmengine 0.10.12, whose
    ``DeepSpeedStrategy`` imports ``deepspeed.runtime.fp16.onebit`` when it is
    built; DeepSpeed 0.19.8 has it no more. Can go when mmengine asks first.
    """
    deepspeed = find_spec('deepspeed')
    if deepspeed is None:
        return
    # Looked up as a folder: to ask DeepSpeed itself is to import it.
    roots = deepspeed.submodule_search_locations or []
    if any(Path(root, 'runtime', 'fp16', 'onebit').exists() for root in roots):
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

    Seen with mmengine 0.10.7, whose checkpoints hold, beside tensors, the
    history of the log, numpy numbers and the functions of two classes by
    name. Nothing else is allowed, so that a foreign pickle is still refused.
    Can go when mmengine saves plain types.
    """
    import numpy as np
    import torch
    from mmengine.logging import HistoryBuffer
    from mmengine.optim.scheduler import OneCycleParamScheduler

    owners = (HistoryBuffer, OneCycleParamScheduler)

    def get_function(owner: Any, name: str) -> Any:
        """Stand in for ``getattr``, which could reach anything."""
        function = getattr(owner, name, None) if owner in owners else None
        if not isfunction(function):
            raise UnpicklingError(f'{name!r} of {owner!r} is not allowed')
        return function

    # Taken from the numbers themselves, since numpy 2 moved their modules.
    # Both paths are allowed: either numpy reads what the other one saved.
    rebuilders = {
        '_reconstruct': np.empty(0).__reduce__()[0],
        'scalar': np.float64(0).__reduce__()[0],
    }
    numbers = (np.int64, np.float32, np.float64)
    torch.serialization.add_safe_globals(
        [
            *owners,
            (get_function, 'builtins.getattr'),
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


def load_safely_only() -> None:
    """Keep a fork of mmengine from unpickling whatever it is given.

    Seen with onedl-mmengine 0.10.12: where the safe load fails it goes on to
    the unsafe one, which runs what the file says. Can go when it does not.
    """
    import torch
    from mmengine.runner import checkpoint

    if hasattr(checkpoint, '_safe_torch_load'):
        checkpoint._safe_torch_load = partial(torch.load, weights_only=True)
