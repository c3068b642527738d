# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Bands give the logits of the whole image, whatever their height."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from infsa_seg.execution import (
    FileStore,
    Grid,
    Layout,
    RamStore,
    Streaming,
    TensorImage,
    read_token_mask,
    resize,
    run_bands,
    run_whole,
)
from infsa_seg.execution import layout as layouts
from infsa_seg.execution.sweeps import split_sweeps
from infsa_seg.layers.protocol import GlobalOp, Tap
from infsa_seg.models.utils import SegmentorNetwork

from .networks import PATCH, VARIANTS, forward, segmentor

# In float32, of logits of a size of about 1.
TOLERANCE = dict(rtol=0, atol=1e-4)


@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('attention', VARIANTS)
def test_bands_equal_the_whole_image(attention, ffn):
    model = segmentor(attention, ffn)
    network = SegmentorNetwork(model)
    for height, width in ((1, 1), (15, 17), (8, 160), (91, 67)):
        pixels = torch.randn(1, 3, height, width)
        whole = forward(model, pixels)
        assert whole.std() > 0.05 or height == 1
        for band_rows in (None, 1, 2, 3, 7):
            logits = run_whole(network, pixels, band_rows=band_rows)
            torch.testing.assert_close(logits, whole, **TOLERANCE)


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    band_rows=st.integers(1, 9),
    attention=st.sampled_from(VARIANTS),
    ffn=st.sampled_from(['mlp', 'dwconv']),
    num_upsamples=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.002, 0.02, 0.5, 1.0]),
    gap=st.sampled_from([1, 2, 32]),
)
def test_any_bands_of_any_image_with_any_mask(
    height, width, band_rows, attention, ffn, num_upsamples, share, gap
):
    """In float64 but for the resizing of the logits: 1e-5."""
    model = segmentor(attention, ffn, num_upsamples).double()
    pixels = torch.randn(1, 3, height, width, dtype=torch.float64)
    valid = torch.rand(height, width) < share
    if share == 0:
        valid = None
    network = SegmentorNetwork(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, '_GAP', gap)
        logits = run_whole(network, pixels, valid, band_rows=band_rows)
    whole = forward(model, pixels, valid).float()
    if valid is not None:
        logits, whole = logits[:, valid], whole[:, valid]
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize('attention', ['linear', 'none'])
@pytest.mark.parametrize('seed', range(2))
def test_tokens_meet_at_corners(attention, seed, monkeypatch):
    """A convolution sees a valid token that lies beside a run of columns.

    In the band above or below; float64, 1e-5.
    """
    monkeypatch.setattr(layouts, '_GAP', 1)
    torch.manual_seed(seed)
    model = segmentor(attention, 'dwconv').double()
    pixels = torch.randn(1, 3, 96, 160, dtype=torch.float64)
    valid = torch.rand(96, 160) < 0.003
    logits = run_whole(SegmentorNetwork(model), pixels, valid, band_rows=1)
    whole = forward(model, pixels, valid).float()
    torch.testing.assert_close(
        logits[:, valid], whole[:, valid], rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('attention', ['linear', 'neumann'])
def test_large_images(attention, ffn):
    """Sizes that nothing divides; 1e-4, and the same classes but for ties."""
    model = segmentor(attention, ffn, 2, patch_size=16)
    network = SegmentorNetwork(model)
    for height, width in ((16, 4000), (1000, 1003), (2050, 1030)):
        pixels = torch.randn(1, 3, height, width)
        whole = forward(model, pixels)
        for band_rows in (1, 7):
            logits = run_whole(network, pixels, band_rows=band_rows)
            torch.testing.assert_close(logits, whole, **TOLERANCE)
            first, second = whole.topk(2, 0).values
            clear = first - second > 1e-3
            assert (logits.argmax(0) == whole.argmax(0))[clear].all()
            assert clear.float().mean() > 0.99


@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('attention', ['linear', 'neumann'])
def test_invalid_pixels_hold_whatever_they_like(attention, ffn):
    """Bit for bit: nodata of any value, NaN too, changes nothing."""
    network = SegmentorNetwork(segmentor(attention, ffn))
    pixels = torch.randn(1, 3, 50, 44)
    valid = torch.rand(50, 44) < 0.7
    valid[:20] = False
    one, other = (
        run_whole(
            network, pixels.masked_fill(~valid, value), valid, band_rows=2
        )
        for value in (torch.nan, 1e9)
    )
    assert one.isfinite().all()
    assert one.equal(other)


@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('attention', ['linear', 'neumann'])
def test_masked_tokens_as_in_the_plain_forward(attention, ffn):
    """1e-4, where pixels are valid."""
    model = segmentor(attention, ffn)
    pixels = torch.randn(1, 3, 64, 72)
    valid = torch.ones(64, 72, dtype=torch.bool)
    valid[16:40, 24:48] = False
    valid[:, 64:] = False
    logits = run_whole(SegmentorNetwork(model), pixels, valid, band_rows=3)
    whole = forward(model, pixels, valid)
    torch.testing.assert_close(logits[:, valid], whole[:, valid], **TOLERANCE)
    # The hidden tokens do have an influence if they are not hidden.
    assert (forward(model, pixels) - whole)[:, :8, :8].abs().max() > 1e-2


def test_no_valid_pixel():
    network = SegmentorNetwork(segmentor())
    pixels = torch.randn(1, 3, 20, 20)
    logits = run_whole(network, pixels, torch.zeros(20, 20).bool())
    assert logits.isfinite().all()


@pytest.mark.parametrize('store_dtype', [torch.bfloat16, torch.float16])
def test_half_store(store_dtype):
    """Tokens rounded between sweeps: 1e-1, but not the same numbers."""
    network = SegmentorNetwork(segmentor())
    pixels = torch.randn(1, 3, 60, 60)
    whole = run_whole(network, pixels)
    logits = run_whole(network, pixels, band_rows=2, store_dtype=store_dtype)
    assert 0 < (logits - whole).abs().max() < 0.1


def test_file_store_equals_ram(tmp_path):
    """Bit for bit."""
    network = SegmentorNetwork(segmentor())
    image = TensorImage(torch.randn(1, 3, 75, 51))
    layout = Layout(*Grid(75, 51, PATCH).shape)
    results = []
    for make in (
        lambda name, width: RamStore(layout, width, torch.float32),
        lambda name, width: FileStore(
            layout, width, torch.float32, tmp_path / name
        ),
    ):
        parts = []
        stores = [make('tokens', 24), make('taps', 16)]
        Streaming(network, image, *stores, band_rows=3).run(
            lambda rows, pieces, parts=parts: parts.extend(
                p.logits.clone() for p in pieces
            )
        )
        for store in stores:
            store.close()
        results.append(parts)
    assert (layout.rows, layout.columns) == (10, 7)
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert not list(tmp_path.iterdir())


def test_pieces_cover_the_image_once_and_stay_small(monkeypatch):
    """However large the image and many the classes."""
    monkeypatch.setattr(resize, '_PIECE', 5 * 300)
    network = SegmentorNetwork(segmentor())
    pixels = torch.randn(1, 3, 43, 61)
    seen = torch.zeros(43, 61)
    sizes = []

    def sink(rows, pieces):
        for row, col, logits in pieces:
            height, width = logits.shape[1:]
            seen[row : row + height, col : col + width] += 1
            assert rows.start <= row and row + height <= rows.stop
            sizes.append(logits.numel())

    run_bands(network, pixels, sink, band_rows=4)
    assert seen.eq(1).all()
    # One token at least, which has 8 x 8 pixels.
    assert max(sizes) <= 5 * 300
    small = run_whole(network, pixels, band_rows=4)
    monkeypatch.undo()
    torch.testing.assert_close(small, run_whole(network, pixels), **TOLERANCE)


@pytest.mark.parametrize(
    ('attention', 'sweeps'),
    [('linear', 7), ('neumann', 4), ('row-inf', 7), ('none', 1)],
)
def test_sweeps_are_as_few_as_the_design_says(attention, sweeps):
    """Three layers of p phases take 3p + 1; the first alone reads pixels."""
    steps = list(SegmentorNetwork(segmentor(attention)).steps())
    found = split_sweeps(steps)
    assert len(found) == sweeps
    assert [s.embeds for s in found] == [True] + [False] * (sweeps - 1)
    applied = [step for sweep in found for step in sweep.steps]
    assert applied == steps
    for sweep in found:
        assert not any(isinstance(s, GlobalOp) for s in sweep.steps[1:])
    assert sum(isinstance(s, Tap) for s in steps) == 2


def test_reads_each_pixel_once(monkeypatch):
    """But for a band's halo, which networks without attention have."""
    network = SegmentorNetwork(segmentor('linear', 'dwconv'))
    image = TensorImage(torch.randn(1, 3, 75, 51))
    read = []
    plain = image.read
    monkeypatch.setattr(
        image, 'read', lambda *part: read.append(part[0]) or plain(*part)
    )
    layout = Layout(10, 7)
    stores = [RamStore(layout, width, torch.float32) for width in (24, 16)]
    seen = []
    Streaming(
        network,
        image,
        *stores,
        band_rows=3,
        on_band=lambda: seen.append(1),
    ).run(lambda rows, pieces: list(pieces))
    assert read == [(0, 24), (24, 48), (48, 72), (72, 75)]
    assert len(seen) == 4 * (7 + 1)


@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_work_is_proportional_to_what_is_valid(ffn, monkeypatch):
    """Pixels read, tokens stored, operations: not those of the glass."""
    monkeypatch.setattr(layouts, '_GAP', 4)
    network = SegmentorNetwork(segmentor('neumann', ffn))
    spots = torch.zeros(256, 1024, dtype=torch.bool)
    spots[40:72, 8:40] = spots[56:88, 900:932] = spots[200:232, 500:532] = True
    counts, stored_at_once = [], []
    for valid in (torch.ones_like(spots), spots):
        image = TensorImage(torch.randn(1, 3, 256, 1024), valid)
        mask = read_token_mask(image, Grid(256, 1024, PATCH), 2)
        pixels, stored = [], []
        monkeypatch.setattr(
            image,
            'read',
            lambda *part, image=image, pixels=pixels: (
                pixels.append(part[0].num_rows * part[1].num_rows)
                or TensorImage.read(image, *part)
            ),
        )
        layout = Layout(32, 128, mask)
        stores = [RamStore(layout, width, torch.float32) for width in (24, 16)]
        monkeypatch.setattr(
            stores[0],
            'write',
            lambda rows, columns, x, store=stores[0], stored=stored: (
                stored.append(x.shape[1] * x.shape[2])
                or RamStore.write(store, rows, columns, x)
            ),
        )
        counter = FlopCounterMode(display=False)
        with counter:
            Streaming(network, image, *stores, band_rows=4).run(
                lambda rows, pieces: list(pieces)
            )
        counts.append((sum(pixels), sum(stored), counter.get_total_flops()))
        # One copy, in stripes.
        assert stores[0].nbytes == 4 * 24 * layout.num_stored
        stored_at_once.append(layout.num_stored)
    assert stored_at_once[1] < stored_at_once[0] / 20
    # 48 of 4096 tokens; bands and halos round up.
    for whole, part in zip(*counts, strict=True):
        assert part < whole / 20


@pytest.mark.parametrize('attention', ['linear', 'neumann', 'row-inf'])
@pytest.mark.parametrize('masked', [False, True])
def test_importance_of_each_token(attention, masked):
    """As of the last layer by itself, mean over the heads; sums to one."""
    model = segmentor(attention)
    last = model.backbone.layers[-1].attn
    last.op.with_importance = True
    pixels = torch.randn(1, 3, 48, 40)
    valid = None
    if masked:
        valid = torch.ones(48, 40, dtype=torch.bool)
        valid[32:] = False
    rows_of = {}

    def keep(rows, values):
        rows_of.update(zip(range(*rows), values, strict=True))

    image = TensorImage(pixels, valid)
    grid = Grid(48, 40, PATCH)
    mask = read_token_mask(image, grid, 2)
    layout = Layout(*grid.shape, mask)
    stores = [RamStore(layout, width, torch.float32) for width in (24, 16)]
    Streaming(SegmentorNetwork(model), image, *stores, band_rows=4).run(
        lambda rows, pieces: list(pieces), keep
    )
    found = torch.stack([rows_of[row] for row in range(6)])

    inputs = []
    handle = last.op.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0]), with_kwargs=True
    )
    forward(model, pixels, valid)
    handle.remove()
    padding = None if mask is None else ~mask.flatten()[None]
    x = inputs[0].flatten(1, 2)
    _, weights = last.op(x, x, x, padding, need_weights=True)
    torch.testing.assert_close(
        found.flatten(), weights[0].detach(), rtol=1e-4, atol=1e-6
    )
    assert found.sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU is there')
@pytest.mark.parametrize('attention', ['linear', 'neumann'])
def test_on_a_gpu(attention):
    """Bands there, tokens here: as on the CPU, 1e-3."""
    model = segmentor(attention)
    pixels = torch.randn(1, 3, 123, 67)
    valid = torch.rand(123, 67) < 0.9
    whole = run_whole(SegmentorNetwork(model), pixels, valid)
    logits = run_whole(
        SegmentorNetwork(model.to('cuda')),
        pixels.to('cuda'),
        valid,
        band_rows=3,
    )
    torch.testing.assert_close(logits.cpu(), whole, rtol=0, atol=1e-3)
