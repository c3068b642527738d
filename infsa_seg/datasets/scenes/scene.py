# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A drawn picture of any size, with its labels, read by window."""

from dataclasses import dataclass

import numpy as np

from . import land_cover, legend, season
from .noise import Noise

# What draws the scenes of a cue, and knows their classes.
PAINTERS = {None: land_cover, 'scene': land_cover, 'legend': legend}

# Pixels that are drawn at once.
_STRIP = 2**16


@dataclass(frozen=True)
class Scene:
    """A procedurally drawn scene; it costs nothing until it is read.

    The pixels are a function of the fields below and of absolute
    coordinates: any window equals the crop of the whole, whatever the size of
    either.

    ``cue`` says what the labels depend on:

    * ``None``: on what is seen at the spot. A countryside of eight classes,
      nearly half of it under two crops, one in rows from left to right, the
      other in rows from top to bottom.
    * ``'scene'``: the same countryside, but a panel in the top left corner
      shows the season, and the season decides which crop is sown in which
      direction. No pixel outside the panel depends on the season.
    * ``'legend'``: regions in eight grey textures. A legend at the top left
      names the class of each, drawn anew for every scene: four classes of two
      textures each. No pixel outside the legend depends on it.

    The cue itself is labelled 255, to be ignored, unless ``label_cue``.

    Args:
        index (int): Number of the scene among those of its seed.
        seed (int): Names an endless series of scenes.
        size (tuple[int, int]): Height and width in pixels.
        cue (str, optional): See above.
        patch (int): Unit of the cue in pixels: the patch size of the network
            that is to read it.
        cue_repeats (int): The panel has a side of this many patches; the
            legend lists each texture this many times. However large the
            scene, the cue stays as it is.
        redraw (int): Another number gives the same scene with another cue:
            the other season if it differs by an odd number, another legend
            in any case.
        label_cue (bool): Label each entry of the legend with the class that
            it names. In training this tells what the colours stand for; in a
            test it would be an answer that needs no looking up.

    Raises:
        ValueError: The cue is unknown, larger than the scene, or to be
            labelled though it is no legend.
    """

    index: int
    seed: int = 0
    size: tuple[int, int] = (128, 128)
    cue: str | None = 'scene'
    patch: int = 8
    cue_repeats: int = 4
    redraw: int = 0
    label_cue: bool = False

    def __post_init__(self) -> None:
        if self.cue not in PAINTERS:
            raise ValueError(
                f'cue={self.cue!r} is unknown; use one of {list(PAINTERS)}'
            )
        if self.label_cue and self.cue != 'legend':
            raise ValueError(
                f'label_cue is for a legend; cue={self.cue!r} has no class'
            )
        height, width = self.cue_size
        if height >= self.size[0] or width > self.size[1]:
            raise ValueError(
                f'the cue of {height}x{width} pixels leaves nothing of a '
                f'scene of {self.size[0]}x{self.size[1]}; enlarge size, or '
                'reduce patch or cue_repeats'
            )

    @property
    def cue_size(self) -> tuple[int, int]:
        """Height and width in pixels of the corner that the cue takes."""
        if self.cue is None:
            return 0, 0
        if self.cue == 'scene':
            return (self.cue_repeats * self.patch,) * 2
        rows, per_row = legend.shape(
            self.size[1], self.patch, self.cue_repeats
        )
        return rows * self.patch, per_row * self.patch

    def read(
        self,
        row: int = 0,
        col: int = 0,
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a window, in time proportional to its area.

        Args:
            row (int): First row, in pixels of the scene.
            col (int): First column.
            height (int, optional): Rows to draw; down to the last by default.
            width (int, optional): Columns to draw; likewise.

        Returns:
            tuple: RGB, uint8 (height, width, 3); labels, uint8 (height,
            width), 255 where the cue is, unless ``label_cue``.

        Raises:
            ValueError: The window is empty or reaches beyond the scene.
        """
        height = self.size[0] - row if height is None else height
        width = self.size[1] - col if width is None else width
        fits = 0 <= row < row + height <= self.size[0]
        if not (fits and 0 <= col < col + width <= self.size[1]):
            raise ValueError(
                f'window of {height}x{width} at ({row}, {col}) is not within '
                f'the scene of {self.size[0]}x{self.size[1]} pixels'
            )
        rgb = np.empty((height, width, 3), np.uint8)
        label = np.empty((height, width), np.uint8)
        # In strips: drawing takes more than 100 bytes per pixel.
        step = max(1, _STRIP // width)
        for top in range(0, height, step):
            strip = slice(top, min(top + step, height))
            rows = np.arange(row + strip.start, row + strip.stop)[:, None]
            cols = np.arange(col, col + width)[None]
            rgb[strip], label[strip] = self._draw(rows, cols)
        return rgb, label

    def _draw(
        self, rows: np.ndarray, cols: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        noise = Noise(0).child(self.seed, self.index)
        colours, label = self._paint(noise, rows, cols)
        return _expose(noise.child('camera'), colours, rows, cols), label

    def _paint(
        self, noise: Noise, rows: np.ndarray, cols: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.cue == 'legend':
            return legend.paint(
                noise,
                noise.child('deal', self.redraw),
                rows,
                cols,
                self.size[1],
                self.patch,
                self.cue_repeats,
                self.label_cue,
            )
        winter = False
        if self.cue == 'scene':
            winter = bool((noise.child('season').key + self.redraw) % 2)
        rgb, label = land_cover.paint(noise, rows, cols, swapped=winter)
        if self.cue == 'scene':
            season.paint(rgb, label, rows, cols, self.cue_size[0], winter)
        return rgb, label


def _expose(
    noise: Noise, rgb: np.ndarray, rows: np.ndarray, cols: np.ndarray
) -> np.ndarray:
    """Photograph colours (3, H, W): uneven light, sensor noise, eight bits."""
    light = noise.child('light').smooth(
        rows.astype(np.float64), cols.astype(np.float64), 200
    )
    bits = noise.child('sensor').hash(rows, cols)
    picture = np.empty((*light.shape, 3), np.uint8)
    for channel, colour in enumerate(rgb):
        grain = (bits >> np.uint64(16 * channel)) & np.uint64(0xFFFF)
        grey = colour * (0.85 + 0.25 * light)
        grey += grain.astype(np.float32) * np.float32(2**-12) - 8
        picture[..., channel] = np.clip(grey, 0, 255)
    return picture
