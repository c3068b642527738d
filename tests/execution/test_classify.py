# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Bands classify an image as the whole forward pass does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from infsa_seg.execution import (
    Grid,
    Layout,
    RamStore,
    Streaming,
    TensorImage,
    make_plan,
    read_token_mask,
)
from infsa_seg.execution.measure import measure
from infsa_seg.execution.sweeps import split_sweeps
from infsa_seg.layers.protocol import BandNetwork, PooledNetwork
from infsa_seg.models.utils import ClassifierNetwork, SegmentorNetwork
from infsa_seg.models.utils.classifier_network import MeanPool
from infsa_seg.ops import Context

from .networks import PATCH, VARIANTS, classifier, pad, segmentor


def streaming_of(network, pixels, valid=None, band_rows=2, **kwargs):
    image = TensorImage(pixels, valid)
    grid = Grid(image.height, image.width, PATCH)
    layout = Layout(*grid.shape, read_token_mask(image, grid, band_rows))
    store = RamStore(layout, network.embed_dims, pixels.dtype)
    return Streaming(
        *(network, image, store, None, band_rows),
        dtype=pixels.dtype,
        **kwargs,
    )


def forward(model, pixels, valid=None):
    """Logits of the plain forward pass, with a mask of any shape."""
    padded, mask = pad(pixels, valid, PATCH)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(model, '_valid_tokens', lambda *_: mask)
        return model(padded)


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    band_rows=st.integers(1, 9),
    attention=st.sampled_from(VARIANTS),
    ffn=st.sampled_from(['mlp', 'dwconv']),
    share=st.sampled_from([0.0, 0.002, 0.01, 0.02]),
    chunk_tokens=st.sampled_from([3, 512]),
)
def test_any_bands_of_any_image_with_any_mask(
    height, width, band_rows, attention, ffn, share, chunk_tokens
):
    """In float64: 1e-10."""
    model = classifier(attention, ffn).double()
    pixels = torch.randn(1, 3, height, width, dtype=torch.float64)
    valid = torch.rand(height, width) < share
    valid[0, 0] = True
    if share == 0:
        valid = None
    network = ClassifierNetwork(model)
    streaming = streaming_of(
        network, pixels, valid, band_rows, chunk_tokens=chunk_tokens
    )
    logits, whole = streaming.classify(), forward(model, pixels, valid)
    assert logits.shape == (1, 7) and whole.std() > 0.05
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_precision(dtype):
    """1e-5 in float32, 0.05 in bfloat16, of logits of a size of about 1."""
    model = classifier()
    pixels = torch.randn(1, 3, 91, 67)
    whole = forward(model, pixels)
    logits = streaming_of(
        ClassifierNetwork(model.to(dtype)), pixels.to(dtype)
    ).classify()
    assert logits.dtype == torch.float32
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits, whole, rtol=0, atol=atol)


def test_the_pool_is_gathered_and_nobody_reads_tokens_after_it():
    network = ClassifierNetwork(classifier('neumann'))
    assert isinstance(network, PooledNetwork)
    assert not isinstance(network, BandNetwork)
    assert isinstance(SegmentorNetwork(segmentor()), BandNetwork)
    *before, last = split_sweeps(network.steps())
    assert isinstance(last.gather, MeanPool) and last.is_last
    assert not last.changes_tokens and before[0].changes_tokens
    # One for each phase of each attention, and one for the pool.
    assert len(before) == sum(
        layer.attn.num_phases for layer in network.backbone.layers
    )


def test_the_pool_as_an_operation_like_any():
    """What it answers each token is the mean over those that count."""
    pool = MeanPool(lambda x: 2 * x, 4)
    x = torch.randn(2, 3, 5, 4)
    valid = torch.rand(2, 3, 5) < 0.5
    valid[:, 0] = True
    answer = pool(x, valid=valid)
    assert answer.shape == x.shape
    for one, mask, image in zip(answer, valid, x, strict=True):
        expected = 2 * image[mask].mean(0)
        torch.testing.assert_close(one, expected.expand(3, 5, 4))
    assert pool.init_state(2, 0, torch.device('cpu')).nbytes == 2 * 4 * 4
    context = pool.finalize(
        pool.accumulate(x, pool.init_state(2, 0, x.device), 0, Context()),
        0,
        Context(torch.tensor([15.0, 15.0])),
    )
    torch.testing.assert_close(context.mean, 2 * x.mean((1, 2)))


def test_importance_is_of_the_last_attention():
    """As the segmentor of the same backbone tells it; 1e-6."""
    model = classifier('neumann', 'mlp')
    other = segmentor('neumann', 'mlp')
    other.backbone.load_state_dict(model.backbone.state_dict())
    for one in (model, other):
        one.backbone.layers[-1].attn.op.with_importance = True
    pixels = torch.randn(1, 3, 40, 56)
    seen, expected = [], []
    streaming_of(ClassifierNetwork(model), pixels).classify(
        lambda rows, values: seen.append(values.clone())
    )
    layout = Layout(5, 7)
    Streaming(
        SegmentorNetwork(other),
        TensorImage(pixels),
        *(RamStore(layout, width, torch.float32) for width in (24, 16)),
        band_rows=5,
    ).run(lambda rows, pieces: list(pieces), lambda _, x: expected.append(x))
    torch.testing.assert_close(
        torch.cat(seen), torch.cat(expected), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_the_plan_knows_the_run(ffn):
    """Operations within a tenth, image borders aside; no store for taps."""
    network = ClassifierNetwork(classifier('neumann', ffn))
    grid = Grid(400, 160, PATCH)
    cost = measure(network, grid, 3)
    streaming = streaming_of(network, torch.randn(1, 3, 400, 160), None, 5)
    counter = FlopCounterMode(display=False)
    with counter:
        streaming.classify()
    assert cost.num_sweeps == len(streaming.sweeps)
    assert cost.flops(5, 50) == pytest.approx(
        counter.get_total_flops(), rel=0.1
    )
    plan = make_plan(network, grid, 3, max_bytes=2**30, resident_bytes=0)
    assert plan.store_bytes == 50 * 20 * 24 * 4


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        (dict(pool='cls_token'), 'class token .* use pool='),
        (dict(attention='softmax'), r'layers.0.attn.op .* or .linear.$'),
        (dict(attention='pure'), r'layers.0.attn.op .* or .linear.$'),
    ],
)
def test_what_bands_cannot_do_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        ClassifierNetwork(classifier(**settings))
