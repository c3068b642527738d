# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Arrays in NumPy's own files."""

from pathlib import Path

import numpy as np

from .base import WindowReader, check_nodata, naming, valid_pixels
from .meta import RasterMeta
from .window import Window

MAGIC = b'\x93NUMPY'


class NpyReader(WindowReader):
    """Reads windows of an array (H, W) or (H, W, C).

    The map of the file is made for each read and dropped: pages that stay
    mapped would count as memory of the process.

    Args:
        path: A ``.npy`` file of booleans, integers or floating-point numbers.
            Booleans are read as uint8.
        nodata: A pixel is invalid where all channels have this value.

    Raises:
        OSError: It cannot be read.
        ValueError: It is cut off, or its array is none of the above.
    """

    def __init__(self, path: Path, nodata: float | None = None) -> None:
        super().__init__(path)
        array = self._map()
        kinds = array.dtype.kind in 'biuf'
        if array.ndim not in (2, 3) or 0 in array.shape or not kinds:
            raise ValueError(
                f'{path}: has an array of shape {array.shape} and type '
                f'{array.dtype}; save numbers of shape (height, width) or '
                '(height, width, channels)'
            )
        dtype = array.dtype.newbyteorder('=')
        if dtype.kind == 'b':
            dtype = np.dtype(np.uint8)
        check_nodata(path, nodata, dtype)
        self.meta = RasterMeta(
            height=array.shape[0],
            width=array.shape[1],
            channels=array.shape[2] if array.ndim == 3 else 1,
            dtype=dtype,
            nodata=nodata,
        )

    def _map(self) -> np.ndarray:
        with naming(
            self.path, 'is cut off or no array of numbers; save it again'
        ):
            array: np.ndarray = np.load(self.path, mmap_mode='r')
            return array

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        array = self._map()[window.slices]
        pixels = np.array(array, self.meta.dtype, order='C')
        pixels = pixels.reshape(window.height, window.width, -1)
        return pixels, valid_pixels(pixels, self.meta.nodata)
