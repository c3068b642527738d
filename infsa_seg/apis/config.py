# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Configs by path or by package name, with errors that name the file."""

import inspect
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner

import infsa_seg


def load_config(
    config: str | Path | Config, cfg_options: dict[str, Any] | None = None
) -> Config:
    """Read a config and override some of its settings.

    Args:
        config (str | Path | Config): A file, ``infsa_seg::NAME.py`` for a
            config that came with the package, or a config already read.
        cfg_options (dict, optional): Values by dotted key, as from
            ``--cfg-options``.

    Returns:
        Config: A config of its own: the one given is not changed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file cannot be evaluated, or an option fits nothing.
    """
    if isinstance(config, Config):
        cfg = deepcopy(config)
    else:
        cfg = _read(_locate(str(config)))
    if cfg_options:
        _check_options(cfg, cfg_options)
        try:
            cfg.merge_from_dict(cfg_options)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f'--cfg-options do not fit {cfg.filename}: {error.args[0]}'
            ) from error
    return cfg


def _locate(config: str) -> Path:
    """The file of a config; the package's own ones go by ``infsa_seg::``."""
    package, found, name = config.rpartition('::')
    if not found:
        path = Path(config)
    elif package == infsa_seg.__name__:
        path = Path(infsa_seg.__file__).parent / '.mim' / 'configs' / name
    else:
        raise ValueError(
            f'{config}: only configs of {infsa_seg.__name__} go by a '
            'package name; give the path of this one'
        )
    if not path.is_file():
        raise FileNotFoundError(
            f'{config}: no such config file (looked for {path.absolute()})'
        )
    return path


def _read(path: Path) -> Config:
    try:
        return Config.fromfile(path)
    # A config is a program, so its mistakes can be of any type.
    except Exception as error:
        cause = error.__cause__ or error
        first_line = str(cause).strip().partition('\n')[0]
        raise ValueError(
            f'{path}: {type(cause).__name__}: {first_line}'
        ) from error


def _check_options(cfg: Config, cfg_options: dict[str, Any]) -> None:
    """Refuse options that nobody would read, such as misspelt ones.

    Keys further down may be new: they are arguments of a class, which
    refuses what it does not know.
    """
    known = {*cfg, *inspect.signature(Runner).parameters, 'strategy'}
    for key in cfg_options:
        first = key.partition('.')[0]
        if first not in known:
            close = get_close_matches(first, known, n=1)
            hint = f'; did you mean {close[0]}?' if close else ''
            raise ValueError(
                f'--cfg-options {key}: the config has no {first!r}{hint}'
            )
