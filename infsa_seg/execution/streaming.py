# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The streaming executor: bands one after another, tokens in a store.

Whatever the height of the bands, the logits are those of one forward pass
over the whole image (DESIGN section 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from infsa_seg.layers.protocol import BandNetwork, GlobalOp, LocalOp, Tap
from infsa_seg.ops import Context, Rows, bands_of

from .bands import Grid, Image
from .resize import Piece, resize_in_pieces
from .resume import Journal, Progress
from .sweeps import Sweep, split_sweeps
from .token_store import TokenStore

_CPU = torch.device('cpu')


# Takes the pixel rows of a band and its logits, in pieces that cover it.
Sink = Callable[[Rows, Iterator[Piece]], None]
# Takes token rows and the importance of each token, float32 (rows, columns),
# on the device.
ImportanceSink = Callable[[Rows, Tensor], None]


@dataclasses.dataclass
class Streaming:
    """One network on one image.

    Attributes:
        network: in evaluation mode, on ``device`` and in ``dtype``.
        image: source of the pixels.
        valid: bool (rows, columns) of the tokens that have a valid pixel, of
            :func:`infsa_seg.execution.bands.read_token_mask`; None for all.
            Others enter no state and have no influence on these.
        tokens: store of ``embed_dims`` channels.
        taps: store of ``tap_dims`` channels.
        band_rows: token rows of a band.
        device, dtype: of the computation.
        chunk_tokens: how many tokens go through token-wise operations at
            once. On a CPU some hundred stay in its cache.
        on_band: called after each band of each sweep.
        journal: keeps what a killed run needs to go on; None keeps nothing.
    """

    network: BandNetwork
    image: Image
    valid: Tensor | None
    tokens: TokenStore
    taps: TokenStore
    band_rows: int
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    chunk_tokens: int = 512
    on_band: Callable[[], None] = lambda: None
    journal: Journal | None = None

    def __post_init__(self) -> None:
        self.grid = Grid(
            self.image.height, self.image.width, self.network.patch_size
        )
        self.bands = bands_of(self.grid.rows, self.band_rows)
        self.sweeps = split_sweeps(self.network.steps())

    @property
    def num_tokens(self) -> int:
        """Valid tokens of the image."""
        if self.valid is None:
            return self.grid.rows * self.grid.columns
        return int(self.valid.sum())

    @torch.no_grad()
    def run(
        self,
        sink: Sink,
        importance: ImportanceSink | None = None,
        wanted: Rows | None = None,
    ) -> None:
        """Segment the image.

        Args:
            sink: takes the logits, band by band from the top.
            importance: takes how much each token receives in the last global
                operation, mean over its heads.
            wanted: token rows whose logits are wanted; None for all.
        """
        progress = Progress()
        if self.journal is not None:
            progress = self.journal.load(self.sweeps)
        ranked = max(
            (i for i, s in enumerate(self.sweeps) if _first_global(s)),
            default=None,
        )
        context = self._context(progress)
        for index in range(progress.sweeps_done, len(self.sweeps)):
            sweep = self.sweeps[index]
            rank = importance if index == ranked else None
            state = self._run_sweep(sweep, context, progress.has_taps, rank)
            if sweep.phase == 0:
                progress.states = []
            if sweep.gather is not None:
                progress.states.append(state)
            if sweep.changes_tokens:
                self.tokens.flip()
            if sweep.has_taps:
                self.taps.flip()
                progress.has_taps = True
            progress.sweeps_done = index + 1
            # A file of its importance would not survive.
            if self.journal is not None and rank is None:
                self.journal.save(progress, self.tokens, self.taps)
            context = self._context(progress)
        self._decode(sink, wanted or Rows(0, self.grid.rows))

    def _decode(self, sink: Sink, wanted: Rows) -> None:
        """Turn the stored taps into logits."""
        network, grid = self.network, self.grid
        for band in self.bands:
            band = Rows(
                max(band.start, wanted.start), min(band.stop, wanted.stop)
            )
            if band.num_rows > 0:
                grown = band.grow(network.halo, grid.rows)
                taps = self.taps.read(grown).to(self.device, self.dtype)
                logits = network.decode(taps, self.mask(grown))
                pieces = resize_in_pieces(
                    logits, grown, band, grid, network.stride
                )
                sink(grid.pixel_rows(band), pieces)
            self.on_band()

    def _context(self, progress: Progress) -> Context:
        """What is known of the image: from the phases done so far."""
        count = torch.tensor([float(self.num_tokens)], device=self.device)
        context = Context(count)
        if not progress.sweeps_done:
            return context
        gather = self.sweeps[progress.sweeps_done - 1].gather
        for phase, state in enumerate(progress.states):
            assert gather is not None
            # Only now: sums of sums lose less in float64.
            dtype = torch.promote_types(self.dtype, torch.float32)
            complete = state.to(self.device, dtype)
            context = gather.finalize(complete, phase, context)
        return context

    def _run_sweep(
        self,
        sweep: Sweep,
        context: Context,
        has_taps: bool,
        importance: ImportanceSink | None,
    ) -> Any:
        """Run a sweep; its state in float64, or None if it gathers nothing."""
        state = None
        if sweep.gather is not None:
            state = sweep.gather.init_state(1, sweep.phase, self.device)
            state = state.to(torch.float64)
        above: Tensor | None = None
        for band in self.bands:
            have = band.grow(sweep.halo, self.grid.rows)
            x = self._load(sweep, Rows(band.start, have.stop))
            if sweep.halo:
                # The store may have overwritten the rows above already.
                x = x if above is None else torch.cat([above, x], 1)
                done = band.stop - have.start
                above = x[:, max(done - sweep.halo, 0) : done]
            if importance is not None:
                importance(band, self._rank(sweep, x, have, band, context))
            work = _Band(self, sweep, context, state, band)
            if sweep.halo:
                work.run_rows(x, have)
            else:
                work.run_tokens(x)
            state = work.state
            if sweep.changes_tokens:
                assert work.tokens is not None
                self.tokens.write(band, work.tokens)
            if sweep.has_taps:
                taps = work.taps
                assert taps is not None
                if has_taps:
                    taps = self.taps.read(band).to(taps.device) + taps
                self.taps.write(band, taps)
            self.on_band()
        return state

    def _load(self, sweep: Sweep, rows: Rows) -> Tensor:
        if not sweep.embeds:
            return self.tokens.read(rows).to(self.device, self.dtype)
        pixel_rows = self.grid.pixel_rows(rows)
        pixels = self.image.read(pixel_rows)
        valid = self.image.read_valid(pixel_rows)
        if valid is not None:
            pixels = pixels.masked_fill(~valid.to(pixels.device), 0)
        pixels = pixels.to(self.device, self.dtype)
        return self.network.embed(pixels, rows.start, self.grid.rows)

    def mask(self, rows: Rows) -> Tensor | None:
        """The mask of token rows, (1, rows, columns); None if all count."""
        if self.valid is None or self.valid[slice(*rows)].all():
            return None
        return self.valid[None, slice(*rows)].to(self.device)

    def _rank(
        self, sweep: Sweep, x: Tensor, have: Rows, band: Rows, context: Context
    ) -> Tensor:
        op = _first_global(sweep)
        x, mask = x[:, band.within(have)], self.mask(band)
        values = op.importance(x, context, mask)  # type: ignore[union-attr]
        return values.float().mean(1).view(x.shape[1:3])


class _Band:
    """A band on its way through a sweep."""

    def __init__(
        self,
        streaming: Streaming,
        sweep: Sweep,
        context: Context,
        state: Any,
        band: Rows,
    ) -> None:
        self.streaming = streaming
        self.sweep = sweep
        self.context = context
        self.state = state
        self.band = band
        # What the band leaves: its tokens, and what its taps contribute.
        self.tokens: Tensor | None = None
        self.taps: Tensor | None = None

    def run_rows(self, x: Tensor, have: Rows) -> None:
        """Run steps that need rows around: ``x`` holds the rows ``have``."""
        total = self.streaming.grid.rows
        mask = self.streaming.mask(have)
        valid = self.streaming.valid
        if valid is not None and not valid[slice(*have)].any():
            x = x[:, self.band.within(have)]
            self.tokens = torch.zeros_like(x)
            width = self.streaming.network.tap_dims
            self.taps = x.new_zeros(*x.shape[:3], width)
            return
        for step in self.sweep.steps:
            if isinstance(step, GlobalOp):
                x = step.attend(x, self.context)
            elif isinstance(step, Tap):
                self._add(step.project(x[:, self.band.within(have)]))
            else:
                assert isinstance(step, LocalOp)
                rows = Rows(
                    have.start + (step.halo if have.start else 0),
                    have.stop - (step.halo if have.stop < total else 0),
                )
                inner = rows.within(have)

                def halo(
                    _: Tensor, n: int, x: Tensor = x, inner: slice = inner
                ) -> tuple[Tensor, Tensor]:
                    return x[:, : inner.start], x[:, inner.stop :]

                x = step(x[:, inner], halo=halo, valid=mask)
                have = rows
                if mask is not None:
                    mask = mask[:, inner]
        x = x[:, self.band.within(have)]
        if mask is not None:
            mask = mask[:, self.band.within(have)]
            x = x.masked_fill(~mask[..., None], 0)
        if self.sweep.gather is not None:
            self.state = self.sweep.gather.accumulate(
                x, self.state, self.sweep.phase, self.context, mask
            )
        self.tokens = x

    def run_tokens(self, x: Tensor) -> None:
        """Run steps that look at one token each, invalid ones left out."""
        flat = x.flatten(1, 2)
        places: Tensor | None = None
        if self.streaming.valid is not None:
            mask = self.streaming.valid[slice(*self.band)].flatten()
            if not mask.all():
                places = mask.nonzero()[:, 0].to(x.device)
                flat = flat[:, places]
        tokens: list[Tensor] = []
        taps: list[Tensor] = []
        for chunk in torch.split(flat, self.streaming.chunk_tokens, 1):
            if not chunk.shape[1]:
                continue
            self.taps = None
            tokens.append(self._run_chunk(chunk[:, None])[:, 0])
            if self.taps is not None:
                taps.append(self.taps[:, 0])
        if self.sweep.changes_tokens:
            self.tokens = _put_back(tokens, places, x, x.shape[3])
        if self.sweep.has_taps:
            width = self.streaming.network.tap_dims
            self.taps = _put_back(taps, places, x, width)

    def _run_chunk(self, x: Tensor) -> Tensor:
        for step in self.sweep.steps:
            if isinstance(step, GlobalOp):
                x = step.attend(x, self.context)
            elif isinstance(step, Tap):
                self._add(step.project(x))
            else:
                assert isinstance(step, LocalOp)
                x = step(x)
        if self.sweep.gather is not None:
            self.state = self.sweep.gather.accumulate(
                x, self.state, self.sweep.phase, self.context
            )
        return x

    def _add(self, contribution: Tensor) -> None:
        if self.taps is not None:
            contribution = self.taps + contribution
        self.taps = contribution


def _put_back(
    parts: list[Tensor], places: Tensor | None, like: Tensor, width: int
) -> Tensor:
    """Chunks (1, n, width) as a band shaped like another; zeros elsewhere."""
    flat = torch.cat([like.new_empty(1, 0, width), *parts], 1)
    if places is not None:
        full = like.new_zeros(1, like.shape[1] * like.shape[2], width)
        full[:, places] = flat
        flat = full
    return flat.view(*like.shape[:3], width)


def _first_global(sweep: Sweep) -> GlobalOp | None:
    """The global operation that a sweep applies."""
    first = next(iter(sweep.steps), None)
    return first if isinstance(first, GlobalOp) else None
