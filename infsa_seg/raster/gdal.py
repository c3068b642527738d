# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Any raster that GDAL knows; by itself, virtual rasters and JPEG 2000."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .base import (
    WindowReader,
    check_nodata,
    is_level,
    naming,
    valid_pixels,
)
from .georeference import georeference_of, quiet_gdal
from .meta import RasterMeta
from .resolution import mpp_of_georeference, mpp_of_tags
from .window import Window

# Bytes of blocks that GDAL keeps.
_CACHE_NBYTES = 64 * 2**20
_DAMAGED = 'cannot be read by GDAL, or names files that are not there'
_JP2 = (b'\x00\x00\x00\x0cjP  ', b'\xff\x4f\xff\x51')
_TAGS = ('XRESOLUTION', 'YRESOLUTION', 'RESOLUTIONUNIT')


def is_for_gdal(head: bytes) -> bool:
    """Whether the first bytes of a file are those of these formats."""
    text = head.lstrip(b'\xef\xbb\xbf \t\r\n')
    return head.startswith(_JP2) or text.startswith(b'<VRTDataset')


class GdalReader(WindowReader):
    """Reads windows through rasterio.

    A palette is resolved to red, green and blue, uint8, but ``meta.nodata``
    is compared with the index. Pixels are valid where an alpha channel, the
    alpha of their colour in a palette, and a mask, in the file or beside it,
    say so. Levels are the overviews that GDAL finds or makes out of what the
    format has. The size of a pixel is what the coordinates say, if there are
    any, else what the resolution tags of a TIFF say.

    Args:
        path: A file that GDAL knows.
        nodata: A pixel is invalid where all channels have this value. The
            default is what the file says itself.
        indexed: Read the indices of a palette, not its colours.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, has channels that are complex or of
            different types, or rasterio is not installed.
    """

    def __init__(
        self, path: Path, nodata: float | None = None, indexed: bool = False
    ) -> None:
        super().__init__(path)
        self._datasets: dict[int, Any] = {}
        self._pid = 0
        # Of each level the number of the overview.
        self._overviews: list[int | None] = [None]
        dataset = self._open(0)
        kinds = [kind.name for kind in dataset.colorinterp]
        alpha = [i for i in dataset.indexes if kinds[i - 1] == 'alpha']
        self._alphas = alpha
        self._channels = [i for i in dataset.indexes if i not in alpha]
        types = {dataset.dtypes[i - 1] for i in self._channels}
        if len(types) != 1:
            raise ValueError(f'{path}: has channels of types {sorted(types)}')
        dtype = np.dtype(types.pop())
        if dtype.kind not in 'uif':
            raise ValueError(
                f'{path}: has values of type {dtype}; convert it to integers '
                'or float'
            )
        self._colours = self._opacities = None
        if not indexed and len(self._channels) == 1 and kinds[0] == 'palette':
            with naming(path, _DAMAGED):
                table = _palette(dataset.colormap(self._channels[0]), dtype)
            self._colours = table[:, :3]
            if not table[:, 3].all():
                self._opacities = table[:, 3]
        flags = {flag.name for flag in dataset.mask_flag_enums[0]}
        self._masked = 'per_dataset' in flags and not alpha
        if nodata is None:
            nodata = dataset.nodata
        check_nodata(path, nodata, dtype)
        sizes = self._find_levels(dataset)
        place = georeference_of(dataset)
        tags = dataset.tags()
        mpp = mpp_of_georeference(place)
        if place is None or place.crs is None:
            mpp = mpp_of_tags(*(tags.get(f'TIFFTAG_{tag}') for tag in _TAGS))
        paletted = self._colours is not None
        self.meta = RasterMeta(
            height=dataset.height,
            width=dataset.width,
            channels=3 if paletted else len(self._channels),
            dtype=np.dtype(np.uint8) if paletted else dtype,
            nodata=nodata,
            has_alpha=bool(alpha)
            or self._masked
            or self._opacities is not None,
            nbytes_resident=_CACHE_NBYTES,
            block_rows=dataset.block_shapes[0][0],
            georeference=place,
            level_sizes=sizes,
            mpp=mpp,
        )

    def _find_levels(self, dataset: Any) -> tuple[tuple[int, int], ...]:
        """Note the overviews that are smaller versions of the picture."""
        sizes = [(dataset.height, dataset.width)]
        with naming(self.path, _DAMAGED):
            count = min(len(dataset.overviews(i)) for i in dataset.indexes)
        for number in range(count):
            self._overviews.append(number)
            smaller = self._open(len(sizes))
            size = (smaller.height, smaller.width)
            if (
                smaller.dtypes == dataset.dtypes
                and is_level(sizes[0], size)
                and max(size) < max(sizes[-1])
            ):
                sizes.append(size)
            else:
                self._datasets.pop(len(sizes)).close()
                self._overviews.pop()
        return tuple(sizes)

    def _open(self, level: int) -> Any:
        if self._pid != os.getpid():
            self._datasets = {}
            self._pid = os.getpid()
        if level not in self._datasets:
            number = self._overviews[level]
            how = {} if number is None else {'overview_level': number}
            try:
                with naming(self.path, _DAMAGED), quiet_gdal() as rasterio:
                    self._datasets[level] = rasterio.open(self.path, **how)
            except ValueError as error:
                if isinstance(error.__cause__, ImportError):
                    raise ValueError(
                        f'{self.path}: needs rasterio; run '
                        "pip install 'infsa_seg[raster]'"
                    ) from error
                raise
        return self._datasets[level]

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        dataset = self._open(level)
        with naming(self.path, _DAMAGED), quiet_gdal() as rasterio:
            place = rasterio.windows.Window(
                window.col, window.row, window.width, window.height
            )
            with rasterio.Env(GDAL_CACHEMAX=_CACHE_NBYTES):
                planes = dataset.read(self._channels, window=place)
                opacities = [
                    dataset.read(i, window=place) for i in self._alphas
                ]
                if self._masked:
                    opacities.append(dataset.read_masks(1, window=place))
        pixels = np.ascontiguousarray(np.moveaxis(planes, 0, 2))
        if self._opacities is not None:
            opacities.append(self._opacities[pixels[..., 0]])
        valid = valid_pixels(pixels, self.meta.nodata, opacities)
        if self._colours is not None:
            pixels = self._colours[pixels[..., 0]]
        return np.ascontiguousarray(pixels), valid

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        super().close()
        datasets, self._datasets = self._datasets, {}
        if self._pid == os.getpid():
            for dataset in datasets.values():
                dataset.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_datasets': {}}


def _palette(
    colours: dict[int, tuple[int, int, int, int]], dtype: np.dtype
) -> np.ndarray:
    """Red, green, blue and alpha of every index, uint8 (indices, 4)."""
    table = np.zeros((np.iinfo(dtype).max + 1, 4), np.uint8)
    table[:, 3] = 255
    for index, colour in colours.items():
        table[index] = colour
    return table
