# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Rasters that converters read, and a look at those that they write."""

import numpy as np
import rasterio

TRANSFORM = rasterio.Affine(0.5, 0, 364000, 0, -0.5, 5810000)
CRS = 'EPSG:32633'


def write_tiff(path, pixels, located=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = np.moveaxis(pixels.reshape(*pixels.shape[:2], -1), 2, 0)
    where = {'transform': TRANSFORM, 'crs': CRS} if located else {}
    if len(planes) == 4:
        # GDAL would take the fourth channel for opacity.
        where['photometric'] = 'MINISBLACK'
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        count=len(planes),
        height=planes.shape[1],
        width=planes.shape[2],
        dtype=planes.dtype,
        **where,
    ) as file:
        file.write(planes)


def read(path):
    """Indices, by another reader than ours, and what else the file says."""
    with rasterio.open(path) as file:
        assert file.count == 1 and file.dtypes == ('uint8',)
        assert file.nodata == 255
        assert file.profile['tiled']
        return file.read(1), {**file.tags(), **file.profile}


def listing(folder):
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob('*')
        if not path.is_dir()
    )
