# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A bar for work that takes long, where somebody watches."""

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar('Item')


def progress(items: Iterable[Item], what: str) -> Iterable[Item]:
    """Go through ``items`` under a bar; without a terminal, just go.

    Args:
        items (iterable): What there is to do, of a known length.
        what (str): Stands before the bar, which is on the standard error.
    """
    console = Console(stderr=True)
    return track(
        items,
        what,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
