# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The streaming executor: bands one after another, tokens in a store.

Whatever the height of the bands, the logits, of every place or of the image,
are those of one forward pass over the whole image (DESIGN section 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infsa_seg.layers.protocol import (
    BandNetwork,
    GlobalOp,
    LocalOp,
    Network,
    PooledNetwork,
    Tap,
)
from infsa_seg.ops import Context, Rows, bands_of

from .bands import Grid, Image
from .resize import Piece, resize_in_pieces
from .resume import Journal, Progress
from .sweeps import Sweep, split_sweeps
from .token_store import TokenStore

_CPU = torch.device('cpu')


# Takes the pixel rows of a band and its logits, in pieces that cover all
# tokens that are valid.
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
        tokens: store of ``embed_dims`` channels. Its layout is that of the
            run: tokens that are not valid enter no state and have no
            influence on others; wide areas of them are neither read nor
            computed.
        taps: store of ``tap_dims`` channels, of the same layout; None for a
            network that has no taps.
        band_rows: token rows of a band.
        device, dtype: of the computation.
        chunk_tokens: how many tokens go through token-wise operations at
            once. On a CPU some hundred stay in its cache.
        on_band: called after each band of each sweep.
        journal: keeps what a killed run needs to go on; None keeps nothing.
    """

    network: Network
    image: Image
    tokens: TokenStore
    taps: TokenStore | None
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
        self.layout = self.tokens.layout
        assert self.taps is None or self.taps.layout is self.layout
        assert (self.layout.rows, self.layout.columns) == self.grid.shape
        self.bands = bands_of(self.grid.rows, self.band_rows)
        self.sweeps = split_sweeps(self.network.steps())

    @torch.no_grad()
    def run(
        self,
        sink: Sink,
        importance: ImportanceSink | None = None,
        wanted: Rows | None = None,
    ) -> None:
        """Segment the image, with a :class:`BandNetwork`.

        Args:
            sink: takes the logits, band by band from the top.
            importance: takes how much each token receives in the last global
                operation that is applied, mean over its heads.
            wanted: token rows whose logits are wanted; None for all.
        """
        self._run_sweeps(importance)
        self._decode(sink, wanted or Rows(0, self.grid.rows))

    @torch.no_grad()
    def classify(self, importance: ImportanceSink | None = None) -> Tensor:
        """Classify the image, with a :class:`PooledNetwork`.

        Args:
            importance: as for :meth:`run`.

        Returns:
            Logits (1, classes), float32 or better.
        """
        assert isinstance(self.network, PooledNetwork)
        return self.network.classify(self._run_sweeps(importance))

    def _run_sweeps(self, importance: ImportanceSink | None) -> Context:
        """Run all sweeps; the context after the last one."""
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
                assert self.taps is not None
                self.taps.flip()
                progress.has_taps = True
            progress.sweeps_done = index + 1
            # A file of its importance would not survive.
            if self.journal is not None and rank is None:
                self.journal.save(progress, self.tokens, self.taps)
            context = self._context(progress)
        return context

    def _decode(self, sink: Sink, wanted: Rows) -> None:
        """Turn the stored taps into logits."""
        for band in self.bands:
            band = Rows(
                max(band.start, wanted.start), min(band.stop, wanted.stop)
            )
            if band.num_rows > 0:
                sink(self.grid.pixel_rows(band), self._pieces(band))
            self.on_band()

    def _pieces(self, band: Rows) -> Iterator[Piece]:
        network, grid = self.network, self.grid
        assert isinstance(network, BandNetwork) and self.taps is not None
        for run in self.layout.runs(band):
            grown = (
                band.grow(network.halo, grid.rows),
                run.grow(network.halo, grid.columns),
            )
            taps = self.taps.read(*grown).to(self.device, self.dtype)
            logits = network.decode(taps, self.mask(*grown))
            yield from resize_in_pieces(
                logits, grown, (band, run), grid, network.stride
            )

    def _context(self, progress: Progress) -> Context:
        """What is known of the image: from the phases done so far."""
        count = float(self.layout.num_valid)
        context = Context(torch.tensor([count], device=self.device))
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
        above = _RowsAbove(sweep.halo, self.grid.columns)
        for band in self.bands:
            ranks = None
            if importance is not None:
                shape = (band.num_rows, self.grid.columns)
                ranks = torch.zeros(shape, device=self.device)
            for run in self.layout.runs(band):
                have = Part(
                    band.grow(sweep.halo, self.grid.rows),
                    run.grow(sweep.halo, self.grid.columns),
                )
                x = self._load(
                    sweep, Rows(band.start, have.rows.stop), have.columns
                )
                # The store may have overwritten the rows above already.
                x = above.join(x, band.start - have.rows.start, have.columns)
                work = _PartOfBand(
                    self, sweep, context, state, Part(band, run), has_taps
                )
                above.keep(work.inside(x, have), run)
                if ranks is not None:
                    ranks[:, slice(*run)] = work.rank(work.inside(x, have))
                work.run(x, have)
                state = work.state
            above.end_band(band)
            if importance is not None and ranks is not None:
                importance(band, ranks)
            self.on_band()
        return state

    def _load(self, sweep: Sweep, rows: Rows, columns: Rows) -> Tensor:
        if not sweep.embeds:
            tokens = self.tokens.read(rows, columns)
            return tokens.to(self.device, self.dtype)
        place = self.grid.pixel_rows(rows), self.grid.pixel_columns(columns)
        pixels = self.image.read(*place)
        valid = self.image.read_valid(*place)
        if valid is not None:
            pixels = pixels.masked_fill(~valid.to(pixels.device), 0)
        return self.network.embed(
            pixels.to(self.device, self.dtype),
            (rows.start, columns.start),
            self.grid.shape,
        )

    def mask(self, rows: Rows, columns: Rows) -> Tensor | None:
        """The mask of some tokens, (1, rows, columns); None if all count."""
        valid = self.layout.valid
        if valid is None:
            return None
        mask = valid[None, slice(*rows), slice(*columns)]
        return None if mask.all() else mask.to(self.device)


class Part(NamedTuple):
    """Tokens of a part of the image."""

    rows: Rows
    columns: Rows


class _RowsAbove:
    """The input of a sweep in the last rows above a band, for its halo.

    Zero where no token is valid.

    Args:
        halo: how many rows.
        columns: of the grid of tokens.
    """

    def __init__(self, halo: int, columns: int) -> None:
        self.halo, self.columns = halo, columns
        self._rows: Tensor | None = None
        self._next: list[tuple[Rows, Tensor]] = []

    def join(self, x: Tensor, num_rows: int, columns: Rows) -> Tensor:
        """Put ``num_rows`` rows above ``x``, in its columns."""
        if not num_rows:
            return x
        above = x.new_zeros(1, num_rows, *x.shape[2:])
        if self._rows is not None:
            above = self._rows[:, -num_rows:, slice(*columns)]
        return torch.cat([above, x], 1)

    def keep(self, x: Tensor, columns: Rows) -> None:
        """Note a part of the band that will be above the next one."""
        if self.halo:
            self._next.append((columns, x[:, -self.halo :].clone()))

    def end_band(self, band: Rows) -> None:
        """Go on to the next band."""
        if not self.halo:
            return
        new = min(band.num_rows, self.halo)
        old, parts = self._rows, self._next
        self._rows, self._next = None, []
        if old is None and not parts:
            return
        like = parts[0][1] if parts else old
        assert like is not None
        shape = (1, self.halo, self.columns, like.shape[3])
        self._rows = like.new_zeros(shape)
        if old is not None:
            self._rows[:, : self.halo - new] = old[:, new:]
        for columns, x in parts:
            self._rows[:, -new:, slice(*columns)] = x


class _PartOfBand:
    """A part of a band on its way through a sweep."""

    def __init__(
        self,
        streaming: Streaming,
        sweep: Sweep,
        context: Context,
        state: Any,
        part: Part,
        has_taps: bool,
    ) -> None:
        self.streaming = streaming
        self.sweep = sweep
        self.context = context
        self.state = state
        self.part = part
        self.has_taps = has_taps
        # What it leaves: its tokens, and what its taps contribute.
        self.tokens: Tensor | None = None
        self.taps: Tensor | None = None

    def inside(self, x: Tensor, have: Part) -> Tensor:
        """The part itself of tokens that cover more, (B, rows, columns)."""
        rows, columns = self.part
        return x[:, rows.within(have.rows), columns.within(have.columns)]

    def run(self, x: Tensor, have: Part) -> None:
        """Go through the sweep, and write to the stores.

        Args:
            x: tokens that cover ``have``, the part with its halo.
            have: of the image.
        """
        if self.sweep.halo:
            self._run_rows(x, have)
        else:
            self._run_tokens(x)
        streaming = self.streaming
        if self.sweep.changes_tokens:
            assert self.tokens is not None
            streaming.tokens.write(*self.part, self.tokens)
        if self.sweep.has_taps:
            taps = self.taps
            assert taps is not None and streaming.taps is not None
            if self.has_taps:
                taps = streaming.taps.read(*self.part).to(taps.device) + taps
            streaming.taps.write(*self.part, taps)

    def rank(self, x: Tensor) -> Tensor:
        """The importance of each token, (rows, columns)."""
        op = _first_global(self.sweep)
        mask = self.streaming.mask(*self.part)
        values = op.importance(x, self.context, mask)  # type: ignore[union-attr]
        return values.float().mean(1).view(x.shape[1:3])

    def _run_rows(self, x: Tensor, have: Part) -> None:
        """Run steps that look at tokens around; those use up rows of x."""
        total = self.streaming.grid.rows
        rows, columns = have
        mask = self.streaming.mask(*have)
        for step in self.sweep.steps:
            if isinstance(step, GlobalOp):
                x = step.attend(x, self.context)
            elif isinstance(step, Tap):
                self._add(step.project(self.inside(x, Part(rows, columns))))
            else:
                assert isinstance(step, LocalOp)
                left = Rows(
                    rows.start + (step.halo if rows.start else 0),
                    rows.stop - (step.halo if rows.stop < total else 0),
                )
                inner = left.within(rows)

                def halo(
                    _: Tensor, n: int, x: Tensor = x, inner: slice = inner
                ) -> tuple[Tensor, Tensor]:
                    return x[:, : inner.start], x[:, inner.stop :]

                x = step(x[:, inner], halo=halo, valid=mask)
                rows = left
                if mask is not None:
                    mask = mask[:, inner]
        x = self.inside(x, Part(rows, columns))
        mask = self.streaming.mask(*self.part)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        if self.sweep.gather is not None:
            self.state = self.sweep.gather.accumulate(
                x, self.state, self.sweep.phase, self.context, mask
            )
        self.tokens = x

    def _run_tokens(self, x: Tensor) -> None:
        """Run steps that look at one token each, invalid ones left out."""
        flat = x.flatten(1, 2)
        places: Tensor | None = None
        valid = self.streaming.layout.valid
        if valid is not None:
            rows, columns = (slice(*some) for some in self.part)
            mask = valid[rows, columns].flatten()
            if not mask.all():
                places = mask.nonzero()[:, 0].to(x.device)
                flat = flat[:, places]
        tokens: list[Tensor] = []
        taps: list[Tensor] = []
        for chunk in torch.split(flat, self.streaming.chunk_tokens, 1):
            self.taps = None
            tokens.append(self._run_chunk(chunk[:, None])[:, 0])
            if self.taps is not None:
                taps.append(self.taps[:, 0])
        if self.sweep.changes_tokens:
            self.tokens = _put_back(tokens, places, x, x.shape[3])
        if self.sweep.has_taps:
            width = taps[0].shape[-1]
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
    flat = torch.cat(parts, 1)
    if places is not None:
        full = like.new_zeros(1, like.shape[1] * like.shape[2], width)
        full[:, places] = flat
        flat = full
    return flat.view(*like.shape[:3], width)


def _first_global(sweep: Sweep) -> GlobalOp | None:
    """The global operation that a sweep applies."""
    first = next(iter(sweep.steps), None)
    return first if isinstance(first, GlobalOp) else None
