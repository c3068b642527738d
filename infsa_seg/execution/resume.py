# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What a killed run leaves behind, so that another can go on from it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .layout import Layout
from .sweeps import Sweep
from .token_store import FileStore, TokenStore


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Attributes:
        sweeps_done: sweeps that are complete.
        states: of the last sweep's global operation, one per phase done.
        has_taps: whether the store of the taps has been written.
    """

    sweeps_done: int = 0
    states: list[Any] = dataclasses.field(default_factory=list)
    has_taps: bool = False


class Journal:
    """The scratch directory of a run: its token files and how far it came.

    Args:
        folder: the directory, which belongs to the run alone.
        identity: what a run that goes on must have in common with this one,
            such as the model and the image, by name.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self._run = folder / 'run.json'
        self._progress = folder / 'progress.pt'

    def begin(self, anew: bool = False) -> None:
        """Make the directory of a new run.

        Args:
            anew: remove what a killed run left there.

        Raises:
            OSError: it is there already, or cannot be made.
        """
        if self.folder.exists():
            self._refuse_if_in_use()
            if not anew:
                raise FileExistsError(
                    f'{self.folder}: left by a run that was killed; use '
                    '--resume to go on from it, or remove it'
                )
            self.end()
        self.folder.mkdir(parents=True)
        self._note_run()

    def reopen(self) -> bool:
        """Take up the directory of a run that was killed.

        Returns:
            False if it did not get as far as the end of its first sweep.

        Raises:
            OSError: the run is still going on.
            ValueError: it belongs to another model, image or set of options.
        """
        if not self._progress.exists():
            return False
        self._refuse_if_in_use()
        theirs = json.loads(self._run.read_text())['identity']
        differing = [
            name
            for name in {**theirs, **self.identity}
            if theirs.get(name) != self.identity.get(name)
        ]
        if differing:
            raise ValueError(
                f'{self.folder}: left by a run with another '
                f'{", ".join(sorted(differing))}; give the same again, or '
                'remove the directory to start anew'
            )
        self._note_run()
        return True

    def store(
        self, name: str, layout: Layout, width: int, dtype: torch.dtype
    ) -> FileStore:
        """A store in the directory, as the run left it or new."""
        current = None
        if self._progress.exists():
            current = self._read()['current'][name]
        return FileStore(layout, width, dtype, self.folder / name, current)

    def save(
        self, progress: Progress, tokens: TokenStore, taps: TokenStore | None
    ) -> None:
        """Note that another sweep is complete, after a crash too."""
        content = {
            'sweeps_done': progress.sweeps_done,
            'states': [vars(state) for state in progress.states],
            'has_taps': progress.has_taps,
            'current': {
                'tokens': getattr(tokens, 'current', 0),
                'taps': getattr(taps, 'current', 0),
            },
        }
        part = self._progress.with_suffix('.part')
        with open(part, 'wb') as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._progress)

    def load(self, sweeps: Sequence[Sweep]) -> Progress:
        """How far the run came; nothing done if it is new."""
        if not self._progress.exists():
            return Progress()
        content = self._read()
        done = content['sweeps_done']
        gather = sweeps[done - 1].gather
        states = []
        for phase, sums in enumerate(content['states']):
            assert gather is not None
            zeros = gather.init_state(1, phase, torch.device('cpu'))
            states.append(dataclasses.replace(zeros, **sums))
        return Progress(done, states, content['has_taps'])

    def end(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note_run(self) -> None:
        run = {'process': os.getpid(), 'identity': self.identity}
        part = self._run.with_suffix('.part')
        part.write_text(json.dumps(run, indent=2))
        part.replace(self._run)

    def _refuse_if_in_use(self) -> None:
        try:
            process = json.loads(self._run.read_text())['process']
            os.kill(process, 0)
        except (OSError, ValueError):
            return  # killed, even before it could note itself
        if process != os.getpid():
            raise FileExistsError(
                f'{self.folder}: in use by process {process}'
            )

    def _read(self) -> dict[str, Any]:
        content = torch.load(
            self._progress, map_location='cpu', weights_only=True
        )
        assert isinstance(content, dict)
        return content
