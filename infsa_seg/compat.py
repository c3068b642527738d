# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Every repair of the stack below us, in one place.

:func:`apply` runs at ``import infsa_seg``. Each repair does nothing where
upstream is healthy, and its docstring names the version it was seen with and
when it can go.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

from .stack import check_versions


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
    find_packages_without_pkg_resources()
    inherit_from_own_configs()
    allow_checkpoint_types()
    load_safely_only()


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


def tame_deepspeed() -> None:
    """Let DeepSpeed work without a compiler, and twice in a process.

    Called by who uses it, for it takes long to import. Seen with DeepSpeed
    0.19.8, which on CPUs builds a shared-memory operator that it can do
    without, and waits for ever where another build was interrupted; can go
    when that is left to the user.
    Seen with mmengine 0.10.7, which registers DeepSpeed's optimizers anew
    with every strategy and fails on the second; can go when it asks first.
    """
    from mmengine._strategy import deepspeed as strategy

    # By its path: the package has PyTorch itself under that name.
    backend: Any = import_module('deepspeed.comm.torch')
    backend.build_shm_op = _no_operator
    register = strategy.register_deepspeed_optimizers
    if not hasattr(register, 'cache_info'):
        strategy.register_deepspeed_optimizers = cache(register)


def _no_operator() -> None:
    return None


def find_packages_without_pkg_resources() -> None:
    """Let configs inherit from ``mmseg::`` where setuptools is recent.

    Seen with mmengine 0.10.7, which finds packages by ``pkg_resources``;
    setuptools 82 has it no more. Can go when mmengine asks ``importlib``, as
    onedl-mmengine 0.10.12 does.
    """
    from mmengine.config import config
    from mmengine.config.utils import MODULE2PACKAGE
    from mmengine.hub import hub
    from mmengine.utils import package_utils

    if find_spec('pkg_resources') is not None:
        return
    modules = {package: module for module, package in MODULE2PACKAGE.items()}

    def get_installed_path(package: str) -> str:
        spec = find_spec(modules.get(package, package))
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f'{package} is not installed')
        return str(Path(spec.origin).parent)

    def is_installed(package: str) -> bool:
        return find_spec(modules.get(package, package)) is not None

    for module in (package_utils, config, hub):
        module.get_installed_path = get_installed_path
        module.is_installed = is_installed


def inherit_from_own_configs() -> None:
    """Let configs say ``_base_ = 'infsa_seg::infvit/....py'``.

    Seen with mmengine 0.10.7, which knows OpenMMLab's packages only, wants a
    folder in the name, and would look for our models in a registry of our
    own. Can go when mmengine resolves other packages as it does these.
    """
    from mmengine.config import Config

    upstream = Config._get_cfg_path
    configs = Path(__file__).parent / '.mim' / 'configs'

    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        package, _, name = cfg_path.rpartition('::')
        if package == __package__:
            return str(configs / name), None
        return upstream(cfg_path, filename)

    Config._get_cfg_path = staticmethod(get_cfg_path)


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

    numbers = (np.int64, np.float32, np.float64)
    torch.serialization.add_safe_globals(
        [
            *owners,
            _known_as(get_function, 'builtins', 'getattr'),
            np.ndarray,
            np.dtype,
            *(type(np.dtype(number)) for number in numbers),
            *_numpy_rebuilders(),
        ]
    )


def _numpy_rebuilders() -> Iterator[Callable[..., Any]]:
    """What numpy calls to unpickle, by its path in numpy 1 and in numpy 2.

    Both paths are allowed: either numpy reads what the other one saved.
    """
    import numpy as np

    for number in (np.empty(0), np.float64()):
        function: Any = number.__reduce__()[0]
        for core in ('core', '_core'):
            yield _known_as(
                function, f'numpy.{core}.multiarray', function.__name__
            )


def _known_as(
    function: Callable[..., Any], module: str, name: str
) -> Callable[..., Any]:
    """Wrap a function so that a pickle finds it by another path.

    torch 2.6 takes the path beside the function; before, it asks the function.
    """

    def known(*args: Any) -> Any:
        return function(*args)

    known.__module__ = module
    known.__name__ = known.__qualname__ = name
    return known


def load_safely_only() -> None:
    """Keep a fork of mmengine from unpickling whatever it is given.

    Seen with onedl-mmengine 0.10.12: where the safe load fails it goes on to
    the unsafe one, which runs what the file says. Can go when it does not.
    """
    import torch
    from mmengine.runner import checkpoint

    if hasattr(checkpoint, '_safe_torch_load'):
        checkpoint._safe_torch_load = partial(torch.load, weights_only=True)
