# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Weights from a file into a module, with an account of what happened."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

# Names under which other code wraps a backbone before it saves it.
WRAPPERS = frozenset({'module', 'model', 'backbone'})
_FOREIGN_TYPE = re.compile(r'GLOBAL (\S+)')
_OTHER_SHAPE = re.compile(r'size mismatch for (\S+):')


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_pretrained` did; every name is the module's own.

    Attributes:
        checkpoint (str): The file (or address) that was read.
        prefix (str): What was taken off the names in the file, such as
            ``'module.backbone.'``.
        loaded (tuple[str]): Entries of the module that now hold the file's
            values.
        missing (tuple[str]): Entries of the module that the file lacks.
        unexpected (tuple[str]): Entries under ``prefix`` that the module
            lacks.
        mismatched (dict[str, tuple]): Entries left alone because the shapes
            differ: ``(shape in the file, shape in the module)``.
        outside (int): Number of entries not under ``prefix``, such as those
            of a decode head when a backbone is loaded.
        meta (dict): What the file says of itself, such as ``dataset_meta``;
            empty where it holds weights alone.
    """

    checkpoint: str
    prefix: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    outside: int
    meta: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether nothing was missing, unexpected or of another shape."""
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """The report as text: one line, and one more per kind of trouble."""
        loaded = len(self.loaded)
        total = loaded + len(self.missing) + len(self.mismatched)
        line = f'{self.checkpoint}: loaded {loaded} of {total} entries'
        if self.prefix:
            line += f', prefix {self.prefix!r} removed'
        if self.outside:
            line += f', {self.outside} under other names left out'
        lines = [line]
        shapes = [
            f'{name} {theirs} into {ours}'
            for name, (theirs, ours) in self.mismatched.items()
        ]
        for kind, names in (
            ('missing in the file', self.missing),
            ('unexpected in the file', self.unexpected),
            ('of another shape, not loaded', shapes),
        ):
            if names:
                lines.append(f'  {len(names)} {kind}: {_some(names)}')
        return '\n'.join(lines)


def check_checkpoint(path: str | Path) -> None:
    """Refuse a file that is no checkpoint, or not one of tensors alone.

    Reads the structure and skips the numbers, so it costs little even where
    the file is large.

    Args:
        path (str | Path): Local file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is no checkpoint, or would run code
            of others when loaded.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f'{path}: no such checkpoint file')
    try:
        content = torch.load(path, map_location='meta', weights_only=True)
    except OSError:
        raise
    # The reader names no closed set of errors for a file that is not its own.
    except Exception as error:
        foreign = _FOREIGN_TYPE.search(str(error))
        if foreign:
            raise ValueError(
                f'{path}: refused, it holds a {foreign[1]} object, which '
                'could run code; save the state_dict alone and load that'
            ) from error
        raise ValueError(
            f'{path}: not a checkpoint, or a damaged one; fetch or save it '
            'again'
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f'{path}: holds a {type(content).__name__}, not a dictionary of '
            'weights'
        )


def load_pretrained(
    module: nn.Module,
    checkpoint: str,
    prefix: str | None = None,
    logger: logging.Logger | str | None = 'current',
) -> LoadReport:
    """Load what fits from a checkpoint, in safe mode, and report the rest.

    The weights may lie under ``state_dict``, under ``model``, or bare. Each
    module's own ``_load_from_state_dict`` is honoured, so entries that adapt
    to another shape there (a position grid) count as loaded.

    Args:
        module (nn.Module): Receives the weights, in place.
        checkpoint (str): Local file, or an address that mmengine's
            ``CheckpointLoader`` knows (``https://``, ...).
        prefix (str, optional): Part of the names in the file to take off.
            Defaults to None: the combination of ``module.``, ``model.`` and
            ``backbone.`` with which most entries match.
        logger (logging.Logger | str, optional): Where the summary goes, as
            for ``mmengine.logging.print_log``.

    Returns:
        LoadReport: Loaded, missing, unexpected and mismatched entries.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no checkpoint of tensors, or nothing in it
            fits the module.
    """
    if '://' not in checkpoint:
        check_checkpoint(checkpoint)
    content = CheckpointLoader.load_checkpoint(checkpoint, 'cpu', logger)
    entries = _find_entries(content)
    own = module.state_dict()

    if prefix is None:
        prefix = _best_prefix(entries, own)
    elif prefix:
        prefix = prefix.rstrip('.') + '.'
    state = {
        name.removeprefix(prefix): value
        for name, value in entries.items()
        if name.startswith(prefix)
    }

    mismatched = {
        name: (tuple(state.pop(name).shape), tuple(own[name].shape))
        for name in _names_of_other_shape(module, state)
    }
    missing, unexpected = module.load_state_dict(state, strict=False)
    missing = [name for name in missing if name not in mismatched]
    report = LoadReport(
        checkpoint=checkpoint,
        prefix=prefix,
        loaded=tuple(
            name
            for name in own
            if name not in missing and name not in mismatched
        ),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=mismatched,
        outside=len(entries) - len(state) - len(mismatched),
        meta=content.get('meta', {}),
    )
    if not report.loaded:
        raise ValueError(
            f'{checkpoint}: nothing in it fits {type(module).__name__}; '
            f'the file has {_some(entries, 3)}; '
            f'the module expects {_some(own, 3)}'
        )
    print_log(
        report.summary(),
        logger=logger,
        level=logging.INFO if report.complete else logging.WARNING,
    )
    return report


def _find_entries(content: Mapping) -> Mapping[str, Tensor]:
    """The weights of a checkpoint, from under the key that holds them."""
    for key in ('state_dict', 'model'):
        if isinstance(content.get(key), Mapping):
            return content[key]
    return content


def _best_prefix(entries: Iterable[str], own: Iterable[str]) -> str:
    """The wrapper names under which most entries match the module's own."""
    prefixes = {''}
    for name in entries:
        prefix = ''
        for part in name.split('.'):
            if part not in WRAPPERS:
                break
            prefix += part + '.'
            prefixes.add(prefix)
    names, own = set(entries), list(own)
    # The shortest of equals: a module may itself contain a `backbone`.
    return max(
        sorted(prefixes, key=len),
        key=lambda prefix: sum(prefix + name in names for name in own),
    )


def _names_of_other_shape(
    module: nn.Module, state: Mapping[str, Tensor]
) -> list[str]:
    """Entries that the module refuses after all its own adaptations.

    Only a load can tell, because a module may resample what does not fit.
    PyTorch reports them in the text of one error.
    """
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        names = _OTHER_SHAPE.findall(str(error))
        if not names or not state.keys() >= set(names):
            raise
        return names
    return []


def _some(names: Iterable[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return (', '.join(names[:most]) or 'nothing') + more
