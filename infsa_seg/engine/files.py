# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Files that appear under their name only when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A place beside ``path`` to write to; renamed to it at the end.

    Args:
        path (str | Path): Where the complete file belongs. Its directory is
            made if need be.

    Yields:
        Path: The file to write. Whatever ends the block early, an interrupt
        included, removes it and leaves ``path`` as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@register_backend('atomic')
class AtomicBackend(LocalBackend):
    """mmengine's local files, written beside their name and then renamed.

    For ``CheckpointHook(backend_args=dict(backend='atomic'))``: upstream
    writes over the old checkpoint, so that an interrupt leaves half a file.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj`` to ``filepath``, all or nothing."""
        with atomic_path(filepath) as part:
            super().put(obj, part)

    def put_text(
        self, obj: str, filepath: str | Path, encoding: str = 'utf-8'
    ) -> None:
        """Write the text ``obj`` to ``filepath``, all or nothing."""
        with atomic_path(filepath) as part:
            super().put_text(obj, part, encoding)
