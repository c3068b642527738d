# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The whole-image executor: the streaming one, with one band."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infsa_seg.layers.protocol import BandNetwork
from infsa_seg.ops import Rows

from .bands import Grid, read_token_mask
from .layout import Layout
from .resize import Piece
from .streaming import Sink, Streaming
from .token_store import RamStore


class TensorImage:
    """An image that is at hand.

    Args:
        pixels: (1, channels, height, width), normalised.
        valid: bool (height, width), or None for all.
    """

    def __init__(self, pixels: Tensor, valid: Tensor | None = None) -> None:
        self.pixels = pixels
        self.valid = valid
        self.height, self.width = pixels.shape[2:]

    def read(self, rows: Rows, columns: Rows) -> Tensor:
        """See :class:`infsa_seg.execution.bands.Image`."""
        return self.pixels[:, :, slice(*rows), slice(*columns)]

    def read_valid(self, rows: Rows, columns: Rows) -> Tensor | None:
        """See :class:`infsa_seg.execution.bands.Image`."""
        if self.valid is None:
            return None
        return self.valid[slice(*rows), slice(*columns)]


def run_bands(
    network: BandNetwork,
    pixels: Tensor,
    sink: Sink,
    valid: Tensor | None = None,
    band_rows: int | None = None,
    store_dtype: torch.dtype | None = None,
) -> None:
    """Segment an image that is at hand, its tokens in memory.

    Args:
        network: in evaluation mode, on the device and in the dtype of
            ``pixels``.
        pixels: (1, channels, height, width), normalised.
        sink: takes the logits.
        valid: bool (height, width), False where a pixel is not to count.
        band_rows: token rows of a band; None for one band, the whole image.
        store_dtype: of the tokens between sweeps; None for that of
            ``pixels``.
    """
    image = TensorImage(pixels, valid)
    grid = Grid(image.height, image.width, network.patch_size)
    band_rows = band_rows or grid.rows
    mask = read_token_mask(image, grid, band_rows)
    layout = Layout(*grid.shape, mask)
    dtype = store_dtype or pixels.dtype
    Streaming(
        network,
        image,
        RamStore(layout, network.embed_dims, dtype),
        RamStore(layout, network.tap_dims, dtype),
        band_rows,
        pixels.device,
        pixels.dtype,
    ).run(sink)


def run_whole(
    network: BandNetwork,
    pixels: Tensor,
    valid: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Logits of an image that is at hand.

    Args:
        network, pixels, valid, **kwargs: as for :func:`run_bands`.

    Returns:
        float32 (classes, height, width); zero where no token is valid.
    """
    logits = pixels.new_zeros(
        network.num_classes, *pixels.shape[2:], dtype=torch.float32
    )

    def sink(rows: Rows, pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            down, across = piece.place()
            logits[:, down, across] = piece.logits

    run_bands(network, pixels, sink, valid, **kwargs)
    return logits
