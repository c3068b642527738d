# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A synthetic scene as a raster, drawn window by window."""

from __future__ import annotations

import numpy as np

from infsa_seg.raster import RasterMeta, Window

from .scenes import Scene


class SceneReader:
    """A :class:`infsa_seg.raster.RasterReader` of a scene.

    Args:
        scene (Scene): What to draw; nothing is kept of it.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        height, width = scene.size
        self.meta = RasterMeta(height, width, 3, np.dtype(np.uint8))

    def read(self, window: Window, level: int = 0) -> np.ndarray:
        """RGB, uint8 (height, width, 3)."""
        return self.scene.read(*window)[0]

    def read_valid(self, window: Window, level: int = 0) -> None:
        """None: every pixel of a scene is valid."""
        return None

    def read_labels(self, window: Window) -> np.ndarray:
        """Class indices, uint8 (height, width), 255 where to be ignored."""
        return self.scene.read(*window)[1]

    def close(self) -> None:
        """Do nothing: there is no file."""

    def __enter__(self) -> SceneReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
