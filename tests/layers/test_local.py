# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Everything local: the same result for one band or many."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from infsa_seg.layers import (
    FFN,
    Block,
    GlobalBranch,
    GlobalOp,
    InfSAAttention,
    LocalBranch,
    LocalOp,
    PatchEmbed,
    PositionEmbedding,
)
from infsa_seg.layers.position import resample_grid
from infsa_seg.ops import Rows, bands_of


def local_branch(kind):
    torch.manual_seed(0)
    branch = LocalBranch(
        nn.LayerNorm(6), FFN(6, 10, kind), nn.Identity()
    ).double()
    # A bias in the norm: rows beyond the border are not the same as zeros.
    nn.init.normal_(branch.norm.bias)
    return branch


@pytest.mark.parametrize('kind', ['mlp', 'dwconv'])
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 6),
    height=st.integers(1, 12),
    masked=st.booleans(),
)
def test_branch_in_bands_equals_whole(kind, rows, columns, height, masked):
    """1e-12, float64."""
    branch = local_branch(kind)
    assert isinstance(branch, LocalOp)
    x = torch.randn(2, rows, columns, 6).double()
    valid = torch.rand(2, rows, columns) < 0.6 if masked else None
    whole = branch(x, valid=valid)
    outputs = []
    for band in bands_of(rows, height):
        grown = band.grow(branch.halo, rows)

        def halo(_, n, band=band, grown=grown):
            assert n == branch.halo
            return x[:, grown.start : band.start], x[:, band.stop : grown.stop]

        outputs.append(
            branch(
                x[:, slice(*band)],
                halo=halo,
                valid=None if valid is None else valid[:, slice(*grown)],
            )
        )
    torch.testing.assert_close(
        torch.cat(outputs, 1), whole, rtol=0, atol=1e-12
    )


def test_collar_changes_nothing_inside():
    """Invalid tokens look to the convolution like the border; 1e-12."""
    branch = local_branch('dwconv')
    x = torch.randn(1, 5, 4, 6).double()
    padded = F.pad(x, (0, 0, 2, 3, 1, 2), value=7.0)
    valid = F.pad(torch.ones(1, 5, 4, dtype=torch.bool), (2, 3, 1, 2))
    inside = branch(padded, valid=valid)[:, 1:6, 2:6]
    torch.testing.assert_close(inside, branch(x), rtol=0, atol=1e-12)


def test_unknown_ffn():
    with pytest.raises(ValueError, match="ffn='conv' is unknown"):
        FFN(4, 8, 'conv')


def test_block_without_attention_is_local():
    block = Block(None, local_branch('mlp'))
    assert [type(step) for step in block.steps()] == [LocalBranch]


def test_quadratic_branch_is_not_global():
    def branch(variant):
        return GlobalBranch(
            nn.LayerNorm(6),
            InfSAAttention(6, 2, variant=variant),
            nn.Identity(),
        )

    assert isinstance(branch('linear'), GlobalOp)
    assert not isinstance(branch('softmax'), GlobalOp)


@pytest.mark.parametrize(
    'size', [(16, 16), (1, 1), (15, 17), (33, 5), (7, 64)]
)
def test_patches_of_any_size(size):
    """Padding at the right and bottom; bands cut at multiples of 4."""
    embed = PatchEmbed(3, 5, 4).double()
    x = torch.randn(2, 3, *size).double()
    whole = embed(x)
    assert whole.shape == (2, -(-size[0] // 4), -(-size[1] // 4), 5)
    padded = F.pad(x, (0, 9, 0, 9))
    torch.testing.assert_close(
        embed(padded)[:, : whole.shape[1], : whole.shape[2]], whole
    )
    banded = [embed(x[:, :, slice(*rows)]) for rows in bands_of(size[0], 8)]
    torch.testing.assert_close(torch.cat(banded, 1), whole)


@given(
    source=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    target=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    height=st.integers(1, 60),
    width=st.integers(1, 60),
)
def test_positions_by_part_equal_interpolate(source, target, height, width):
    """Any grid to any grid against torch's bicubic; 1e-5, float32."""
    grid = torch.randn(*source, 3)
    expected = F.interpolate(
        grid.permute(2, 0, 1)[None], target, mode='bicubic'
    )[0].permute(1, 2, 0)
    pieces = [
        torch.cat(
            [
                resample_grid(grid, target, rows, columns)
                for columns in bands_of(target[1], width)
            ],
            1,
        )
        for rows in bands_of(target[0], height)
    ]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-5)


def test_positions_on_a_large_grid():
    """576 x 576 tokens, as in an image of 9216 x 9216; 1e-5, float32."""
    grid = torch.randn(14, 14, 4)
    expected = F.interpolate(
        grid.permute(2, 0, 1)[None], (576, 576), mode='bicubic'
    )[0].permute(1, 2, 0)
    band = resample_grid(grid, (576, 576), Rows(300, 317), Rows(9, 576))
    torch.testing.assert_close(band, expected[300:317, 9:], rtol=0, atol=1e-5)


def test_positions_are_added_by_offset():
    position = PositionEmbedding(3, (4, 5))
    x = torch.randn(2, 9, 7, 3)
    whole = position(x)
    part = position(x[:, 2:6, 3:], first=(2, 3), size=(9, 7))
    torch.testing.assert_close(part, whole[:, 2:6, 3:], rtol=0, atol=1e-6)
    exact = position(torch.zeros(1, 4, 5, 3))[0]
    assert exact.equal(position.weight)


def test_positions_interpolate_in_float32():
    position = PositionEmbedding(3, (4, 5)).bfloat16()
    out = position(torch.zeros(1, 9, 7, 3, dtype=torch.bfloat16))
    expected = resample_grid(
        position.weight.float(), (9, 7), Rows(0, 9), Rows(0, 7)
    )
    assert out.dtype == torch.bfloat16
    assert out[0].equal(expected.bfloat16())


def test_positions_of_another_grid_are_loaded():
    small, large = PositionEmbedding(3, (4, 5)), PositionEmbedding(3, (8, 6))
    large.load_state_dict(small.state_dict())
    expected = resample_grid(
        small.weight.detach(), (8, 6), Rows(0, 8), Rows(0, 6)
    )
    assert large.weight.equal(expected)
    with pytest.raises(RuntimeError, match='size mismatch'):
        PositionEmbedding(2, (4, 5)).load_state_dict(small.state_dict())
