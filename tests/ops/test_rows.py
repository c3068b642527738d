# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infsa_seg.ops.rows import Rows, bands_of, split_rows


@given(st.integers(0, 500), st.integers(1, 20), st.integers(1, 9))
def test_split_covers_all_rows_once(num_rows, parts, multiple):
    pieces = split_rows(num_rows, parts, multiple)
    assert len(pieces) == parts
    assert [r for p in pieces for r in range(*p)] == list(range(num_rows))
    inner = [p.start for p in pieces[1:]]
    assert all(b % multiple == 0 or b == num_rows for b in inner)
    heights = [p.num_rows for p in pieces if p.stop < num_rows]
    assert not heights or max(heights) - min(heights) <= multiple


def test_split_is_even():
    assert [p.num_rows for p in split_rows(10, 3)] == [4, 3, 3]
    assert [p.num_rows for p in split_rows(2, 3)] == [1, 1, 0]


@given(st.integers(0, 100), st.integers(1, 30))
def test_bands_cover_all_rows_once(num_rows, height):
    bands = bands_of(num_rows, height)
    assert [r for b in bands for r in range(*b)] == list(range(num_rows))
    assert all(b.num_rows == height for b in bands[:-1])


def test_halo_is_clipped_and_cropped_back():
    rows = Rows(2, 5)
    grown = rows.grow(3, total=6)
    assert grown == (0, 6)
    assert list(range(*grown))[rows.within(grown)] == [2, 3, 4]


def test_refuses_nonsense():
    with pytest.raises(ValueError, match='parts >= 1'):
        split_rows(3, 0)
    with pytest.raises(ValueError, match='at least one row'):
        bands_of(3, 0)
