# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What only GDAL reads: virtual rasters and JPEG 2000."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .base import WindowReader, check_nodata, naming, valid_pixels
from .georeference import georeference_of, quiet_gdal
from .meta import RasterMeta
from .window import Window

# Bytes of blocks that GDAL keeps.
_CACHE_NBYTES = 64 * 2**20
_DAMAGED = 'cannot be read by GDAL, or names files that are not there'
_JP2 = (b'\x00\x00\x00\x0cjP  ', b'\xff\x4f\xff\x51')


def is_for_gdal(head: bytes) -> bool:
    """Whether the first bytes of a file are those of these formats."""
    text = head.lstrip(b'\xef\xbb\xbf \t\r\n')
    return head.startswith(_JP2) or text.startswith(b'<VRTDataset')


class GdalReader(WindowReader):
    """Reads windows through rasterio.

    Args:
        path: A file that GDAL knows.
        nodata: A pixel is invalid where all channels have this value. The
            default is what the file says itself.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, or rasterio is not installed.
    """

    def __init__(self, path: Path, nodata: float | None = None) -> None:
        super().__init__(path)
        self._dataset: Any = None
        self._pid = 0
        dataset = self._open()
        alpha = [
            index
            for index, kind in enumerate(dataset.colorinterp, 1)
            if kind.name == 'alpha'
        ]
        self._alphas = alpha
        self._channels = [i for i in dataset.indexes if i not in alpha]
        kinds = {dataset.dtypes[i - 1] for i in self._channels}
        if len(kinds) != 1:
            raise ValueError(f'{path}: has channels of types {sorted(kinds)}')
        dtype = np.dtype(kinds.pop())
        if nodata is None:
            nodata = dataset.nodata
        check_nodata(path, nodata, dtype)
        self.meta = RasterMeta(
            height=dataset.height,
            width=dataset.width,
            channels=len(self._channels),
            dtype=dtype,
            nodata=nodata,
            has_alpha=bool(alpha),
            nbytes_resident=_CACHE_NBYTES,
            block_rows=dataset.block_shapes[0][0],
            georeference=georeference_of(dataset),
        )

    def _open(self) -> Any:
        if self._dataset is None or self._pid != os.getpid():
            try:
                with naming(self.path, _DAMAGED), quiet_gdal() as rasterio:
                    self._dataset = rasterio.open(self.path)
            except ValueError as error:
                if isinstance(error.__cause__, ImportError):
                    raise ValueError(
                        f'{self.path}: needs rasterio; run '
                        "pip install 'infsa_seg[raster]'"
                    ) from error
                raise
            self._pid = os.getpid()
        return self._dataset

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        dataset = self._open()
        with naming(self.path, _DAMAGED), quiet_gdal() as rasterio:
            place = rasterio.windows.Window(
                window.col, window.row, window.width, window.height
            )
            with rasterio.Env(GDAL_CACHEMAX=_CACHE_NBYTES):
                planes = dataset.read(self._channels, window=place)
                alphas = [dataset.read(i, window=place) for i in self._alphas]
        pixels = np.ascontiguousarray(np.moveaxis(planes, 0, 2))
        return pixels, valid_pixels(pixels, self.meta.nodata, alphas)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        super().close()
        dataset, self._dataset = self._dataset, None
        if dataset is not None and self._pid == os.getpid():
            dataset.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_dataset': None}
