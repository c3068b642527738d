# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a conversion did, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple


class Converted(NamedTuple):
    """A layer that was replaced.

    Args:
        name: of the layer in the model, such as ``'blocks.0.attn'``.
        type: class of the layer that was there.
        variant: of the attention that is there now.
    """

    name: str
    type: str
    variant: str


class Skipped(NamedTuple):
    """A layer that was left as it is.

    Args:
        name: of the layer in the model.
        type: its class.
        reason: why, in words.
    """

    name: str
    type: str
    reason: str


class Note(NamedTuple):
    """What else the caller should know.

    Args:
        name: of a layer or another module.
        text: in words.
    """

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What :func:`infsa_seg.convert` did; prints as a table.

    Attributes:
        converted: the layers that were replaced.
        skipped: those that look like attention and were left, with reasons.
        notes: what a replaced layer lost (dropout of the weights), and fast
            paths that were switched off.
    """

    converted: list[Converted] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    notes: list[Note] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        rows = [
            (name, type_, f'converted to {variant!r}')
            for name, type_, variant in self.converted
        ]
        rows += [
            (name, type_, f'skipped: {reason}')
            for name, type_, reason in self.skipped
        ]
        rows += [(name, '', f'note: {text}') for name, text in self.notes]
        lines = [
            f'{len(self.converted)} converted, {len(self.skipped)} skipped'
        ]
        return '\n'.join(lines + _align(rows))


def _align(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    rows = list(rows)
    first, second = (
        max((len(row[column]) for row in rows), default=0) for column in (0, 1)
    )
    return [f'  {a:<{first}}  {b:<{second}}  {c}' for a, b, c in rows]
