# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is known of a raster before its pixels are read."""

from dataclasses import dataclass

import numpy as np

from .georeference import Georeference


@dataclass(frozen=True)
class RasterMeta:
    """The form of a raster, and what it costs to keep it open.

    Args:
        height: rows in pixels.
        width: columns in pixels.
        channels: values per pixel, alpha not counted.
        dtype: type of the values that are read, in native byte order.
        nodata: value that marks a pixel as invalid if all channels have it;
            of a palette file, the index.
        has_alpha: whether the file says which pixels are valid: by an alpha
            channel, or by a mask beside the picture.
        nbytes_resident: bytes of pixels and of tables that the open reader
            may keep, beside what a read returns. A memory plan counts them.
        block_rows: height of the blocks (tiles or strips) that the file is
            made of. Bands of a multiple of this decode each block once.
        georeference: where on earth it lies, if it is known.
        level_sizes: (height, width) of each level of a pyramid, the full
            resolution first. Every level covers the whole picture.
        mpp: micrometres per pixel of the full resolution, down and across,
            if the file says so.
    """

    height: int
    width: int
    channels: int
    dtype: np.dtype
    nodata: float | None = None
    has_alpha: bool = False
    nbytes_resident: int = 0
    block_rows: int = 1
    georeference: Georeference | None = None
    level_sizes: tuple[tuple[int, int], ...] = ()
    mpp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.level_sizes:
            size = (self.height, self.width)
            object.__setattr__(self, 'level_sizes', (size,))

    @property
    def all_valid(self) -> bool:
        """Whether every pixel is valid, whatever the values are."""
        return (
            self.nodata is None
            and not self.has_alpha
            and self.dtype.kind != 'f'
        )
