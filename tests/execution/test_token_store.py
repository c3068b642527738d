# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Stores keep the tokens of a layout, and zeros elsewhere."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.execution import FileStore, Layout, RamStore
from infsa_seg.execution import layout as layouts
from infsa_seg.ops import Rows


def some_rows(draw, total):
    start = draw(st.integers(0, total - 1))
    return Rows(start, draw(st.integers(start + 1, total)))


@given(
    data=st.data(),
    size=st.tuples(st.integers(1, 30), st.integers(1, 90)),
    share=st.sampled_from([0.0, 0.003, 0.05, 0.9, 1.0]),
    gap=st.sampled_from([1, 5, 32]),
    on_disk=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_as_a_plain_array(data, size, share, gap, on_disk, dtype, seed):
    """Any parts, written and read in any order, bit for bit."""
    torch.manual_seed(seed)
    valid = torch.rand(size) < share
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
    ):
        patch.setattr(layouts, '_GAP', gap)
        layout = Layout(*size, valid)
        store = (
            FileStore(layout, 3, dtype, Path(folder) / 'tokens')
            if on_disk
            else RamStore(layout, 3, dtype)
        )
        plain = torch.zeros(1, *size, 3, dtype=dtype)
        height = data.draw(st.integers(1, 9))
        for start in range(0, size[0], height):
            band = Rows(start, min(start + height, size[0]))
            for run in layout.runs(band):
                place = (slice(None), slice(*band), slice(*run))
                x = torch.randn(1, band.num_rows, run.num_rows, 3).to(dtype)
                # As a sweep leaves it.
                x[~valid[None, slice(*band), slice(*run)]] = 0
                plain[place] = x
                store.write(band, run, x)
        store.flip()
        for _ in range(3):
            rows = some_rows(data.draw, size[0])
            columns = some_rows(data.draw, size[1])
            found = store.read(rows, columns)
            expected = plain[:, slice(*rows), slice(*columns)]
            assert found.equal(expected)
            found += 1  # the caller's own
        assert store.nbytes == layout.num_stored * 3 * dtype.itemsize
        if on_disk:
            sizes = {path.stat().st_size for path in store.paths}
            assert sizes == {store.nbytes}
        store.close()


def test_few_tokens_take_little():
    """Three spots on a slide: their tokens, and the rest of their stripes."""
    valid = torch.zeros(1000, 4000, dtype=torch.bool)
    valid[100:140, 500:540] = valid[100:140, 3000:3040] = True
    valid[803:845, 900:940] = True
    layout = Layout(1000, 4000, valid)
    assert layout.num_valid == 40 * 40 * 2 + 42 * 40
    assert layout.num_valid <= layout.num_stored <= 1.2 * layout.num_valid
    assert Layout(1000, 4000).num_stored == 4_000_000


def test_an_image_that_is_valid_is_one_block():
    (block,) = Layout(100, 70).blocks(Rows(13, 57))
    assert block == (13 * 70, (13, 57), [(0, 70)])
