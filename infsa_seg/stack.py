# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The versions of the stack below us: which can work, which were tested."""

import logging
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

from packaging.specifiers import SpecifierSet


class IncompatibleError(ImportError):
    """An installed, or missing, distribution that we cannot work with."""


# Everything that must be importable, by the distributions that provide it.
PROVIDERS = {
    'torch': ('torch',),
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
    'ftfy': ('ftfy',),
    'regex': ('regex',),
}


class Limit(NamedTuple):
    """The versions of a module that can work, and why others cannot."""

    module: str
    versions: str
    reason: str
    install: str
    # The limit holds only where this distribution is installed.
    beside: str | None = None


LIMITS = (
    Limit(
        'torch',
        '>=2.4',
        'it cannot load checkpoints safely',
        'torch>=2.4',
    ),
    Limit(
        'mmengine',
        '>=0.10',
        'it cannot inherit from our configs',
        'mmengine>=0.10.7,<1',
    ),
    Limit('mmcv', '>=2', 'mmsegmentation 1 needs 2', 'mmcv-lite==2.1.0'),
    Limit(
        'mmcv',
        '<2.2',
        'mmsegmentation refuses it',
        'mmcv-lite==2.1.0',
        beside='mmsegmentation',
    ),
    Limit(
        'mmseg',
        '>=1.2.1',
        '1.2.0 lacks a file, older ones refuse mmcv 2.1',
        'mmsegmentation>=1.2.2,<2',
    ),
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
    'onedl-mmcv': '>=2.3.6,<2.4',
    'mmsegmentation': '>=1.2.2,<1.3',
    'onedl-mmsegmentation': '>=1.4.2,<1.5',
}


def check_versions() -> None:
    """Refuse what cannot work, warn in one line of what was not tested.

    Raises:
        IncompatibleError: See :data:`LIMITS`; the message is one line that
            says what to install.
    """
    installed = _installed()
    for limit in LIMITS:
        _check(limit, installed)
    untested = [
        f'{name} {installed[name]} (tested: {versions})'
        for name, versions in TESTED.items()
        if name in installed and not _within(installed[name], versions)
    ]
    if untested:
        logging.getLogger(__package__).warning(
            'infsa_seg is untested with %s', ', '.join(untested)
        )


def _installed() -> dict[str, str]:
    """Versions by distribution, of those that provide anything we need."""
    versions = {}
    for name in sum(PROVIDERS.values(), ()):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


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


def _within(version: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)
