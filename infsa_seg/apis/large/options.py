# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How a large image is segmented."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from infsa_seg.execution import parse_bytes

from ..pictures import Palette

DTYPES = {
    'fp32': torch.float32,
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
}
PROBS = {'uint8': np.uint8, 'float16': np.float16}
STORES = ('auto', 'ram', 'disk')
# For the arguments of the tool.
large_choices = {
    'store': STORES,
    'dtype': tuple(DTYPES),
    'probs': tuple(PROBS),
}


@dataclasses.dataclass(frozen=True)
class LargeOptions:
    """How a large image is segmented.

    Attributes:
        max_memory (str | int): What the process may take, such as ``'4GiB'``,
            weights included.
        store (str): Where tokens wait between sweeps: 'ram', 'disk', or
            'auto', memory if there is enough.
        scratch (str | Path, optional): Directory for tokens on disk. A
            directory of each image's own is made in it, and removed at the
            end. Defaults to that of the mask.
        dtype (str): Of the computation, 'fp32', 'bf16' or 'fp16'.
        store_dtype (str, optional): Of the tokens between sweeps; defaults to
            ``dtype``.
        band_rows (int, optional): Token rows of a band. Defaults to what fits
            into memory.
        probs (str, optional): Write class probabilities too, 'uint8' (255 is
            certain) or 'float16'.
        centrality (bool): Write how much each token receives from all others
            in the last attention, 1 being the average.
        areas (bool): Write a table of pixels and area per class, as CSV.
        overview (bool): Write a PNG of the image under its classes.
        palette (sequence, optional): One (red, green, blue) per class, in
            place of the model's.
        labels (str | Path, optional): Directory with the true class indices,
            NAME.png or NAME.tif.
        nodata (float, optional): A pixel is not valid where all channels have
            this value. Defaults to what the file says itself.
        channels (sequence, optional): Numbers of the channels to use, from 1
            on, in the order in which the model takes them.
        verify (int, optional): Run again with other bands, and compare the
            logits of so many rows of pixels in the middle.
        overwrite (bool): Replace files that exist.
        resume (bool): Go on from what a killed run left on disk.

    Raises:
        ValueError: A value is none of these.
    """

    max_memory: str | int = '4GiB'
    store: str = 'auto'
    scratch: str | Path | None = None
    dtype: str = 'fp32'
    store_dtype: str | None = None
    band_rows: int | None = None
    probs: str | None = None
    centrality: bool = False
    areas: bool = False
    overview: bool = False
    palette: Palette | None = None
    labels: str | Path | None = None
    nodata: float | None = None
    channels: Sequence[int] | None = None
    verify: int | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.max_memory)
        for name, known in (
            ('store', STORES),
            ('dtype', tuple(DTYPES)),
            ('store_dtype', (None, *DTYPES)),
            ('probs', (None, *PROBS)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f'{name}={value!r} is unknown; use one of {known}'
                )
        for name in ('band_rows', 'verify'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}={value}: give 1 or more')
