# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the files of an input are called."""

from __future__ import annotations

from pathlib import Path

from .options import LargeOptions


def paths_of(
    out: str | Path, stem: str, options: LargeOptions
) -> dict[str, Path]:
    """The files of an input, by kind; the mask first.

    Args:
        out (str | Path): Of the mask if it ends in .tif or .tiff; else a
            directory.
        stem (str): Name of the input.
        options (LargeOptions): Which there are to be.
    """
    out = Path(out)
    if out.suffix.lower() in ('.tif', '.tiff'):
        folder, stem, mask = out.parent, out.stem, out
    else:
        folder, mask = out, out / f'{stem}_mask.tif'
    paths = {'mask': mask}
    endings = {
        'probs': options.probs and 'tif',
        'centrality': options.centrality and 'tif',
        'areas': options.areas,
        'polygons': options.polygons,
        'overview': options.overview and 'png',
        'tissue': options.tissue not in (None, 'none') and 'png',
        'manifest': options.manifest and 'json',
    }
    for kind, ending in endings.items():
        if ending:
            paths[kind] = folder / f'{stem}_{kind}.{ending}'
    if options.style:
        # QGIS looks for this name.
        paths['style'] = mask.with_suffix('.qml')
    return paths
