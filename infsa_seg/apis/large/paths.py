# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the files of an input are called."""

from __future__ import annotations

from pathlib import Path

from .options import LargeOptions

# What the first file of an input ends in, by its kind.
ENDINGS = {'mask': ('.tif', '.tiff'), 'label': ('.json',)}


def is_file(out: str | Path, kind: str) -> bool:
    """Whether a path names that file, and not a directory."""
    return Path(out).suffix.lower() in ENDINGS[kind]


def paths_of(
    out: str | Path, stem: str, options: LargeOptions, kind: str
) -> dict[str, Path]:
    """The files of an input, by kind; the mask or the label first.

    Args:
        out (str | Path): Of the first file if it ends as that does; else a
            directory.
        stem (str): Name of the input.
        options (LargeOptions): Which there are to be.
        kind (str): Of the first file, ``'mask'`` or ``'label'``.
    """
    out = Path(out)
    if is_file(out, kind):
        folder, stem, first = out.parent, out.stem, out
    else:
        folder, first = out, out / f'{stem}_{kind}{ENDINGS[kind][0]}'
    paths = {kind: first}
    endings = {
        'probs': options.probs and 'tif',
        'centrality': options.centrality and 'tif',
        'areas': options.areas,
        'polygons': options.polygons,
        'overview': options.overview and 'png',
        'tissue': options.tissue not in (None, 'none') and 'png',
        'manifest': options.manifest and 'json',
    }
    for name, ending in endings.items():
        if ending:
            paths[name] = folder / f'{stem}_{name}.{ending}'
    if options.style:
        # QGIS looks for this name.
        paths['style'] = first.with_suffix('.qml')
    return paths
