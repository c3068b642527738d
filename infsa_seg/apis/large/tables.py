# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How much of each class there is."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infsa_seg.engine import atomic_path
from infsa_seg.raster import RasterMeta

# Where the classes of a whole image are but one.
_ALL = 0.999999


def write_areas(
    path: Path, classes: Sequence[str], counts: np.ndarray, meta: RasterMeta
) -> None:
    """Write pixels, share and area of each class.

    In square metres, hectares and square millimetres; where the size of a
    pixel is not known the columns are empty.

    Args:
        path (Path): Ends in .csv or .json.
        classes (sequence): Their names.
        counts (ndarray): Pixels of each.
        meta (RasterMeta): Of the raster at the resolution of the pixels.
    """
    place, mpp = meta.georeference, meta.mpp
    square_metres = None if place is None else place.pixel_area
    if square_metres is None and place is None and mpp is not None:
        square_metres = mpp[0] * mpp[1] * 1e-12
    total = max(int(counts.sum()), 1)
    rows = []
    for name, count in zip(classes, counts.tolist(), strict=False):
        row: dict[str, Any] = {
            'class': name,
            'pixels': count,
            'share': round(count / total, 6),
        }
        for unit, size in _UNITS.items():
            area = None if square_metres is None else count * square_metres
            row[unit] = None if area is None else float(f'{area / size:.10g}')
        rows.append(row)
    with (
        atomic_path(path) as part,
        open(part, 'w', newline='', encoding='utf-8') as file,
    ):
        if path.suffix == '.json':
            json.dump(rows, file, indent=2, ensure_ascii=False)
            file.write('\n')
            return
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


_UNITS = {'square_metres': 1.0, 'hectares': 1e4, 'square_millimetres': 1e-6}


def summarise(
    classes: Sequence[str], counts: np.ndarray, num_pixels: int
) -> dict[str, Any]:
    """Shares of valid pixels and of classes; whether it is all one class.

    Args:
        classes (sequence): Their names.
        counts (ndarray): Pixels of each.
        num_pixels (int): Of the whole raster.
    """
    total = int(counts.sum())
    shares = {
        name: round(count / max(total, 1), 6)
        for name, count in zip(classes, counts.tolist(), strict=False)
    }
    largest = max(shares, key=lambda name: shares[name])
    return {
        'valid': round(total / num_pixels, 6),
        'classes': shares,
        'one_class': largest if shares[largest] > _ALL else None,
    }
