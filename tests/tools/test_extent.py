# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import importlib.util

import numpy as np
import pytest
import torch

from infsa_seg.layers import LandmarkInfSA
from tests.apis.conftest import REPO

TOOL = 'analysis/extent.py'


@pytest.fixture(scope='module')
def extent():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location(
        'extent', REPO / 'tools' / TOOL
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator(seed):
    return torch.Generator().manual_seed(seed)


def read(extent, tokens):
    """What each token shows, and the entries of the legend as they stand."""
    texture = tokens[..., : extent.NUM_TEXTURES].argmax(-1)
    mark = tokens[..., extent.NUM_TEXTURES :].argmax(-1)
    entries = zip(
        texture[:2, :16].flatten().tolist(),
        mark[:2, :16].flatten().tolist(),
        strict=True,
    )
    return texture, list(entries)


class TestImages:
    def test_the_legend_decides(self, extent):
        for seed in range(50):
            source = generator(seed)
            tokens, labels = extent.draw(extent.deal(source), 16, source)
            texture, entries = read(extent, tokens)
            # One class for each texture, which stands four times.
            legend = sorted(set(entries))
            assert [t for t, _ in legend] == list(range(extent.NUM_TEXTURES))
            assert {entries.count(entry) for entry in legend} == {4}
            meaning = torch.tensor([c for _, c in legend])
            assert meaning.bincount().tolist() == [2, 2, 2, 2]
            field = labels != extent.NO_CLASS
            assert field.sum() == 256 - 32 and not field[:2, :16].any()
            assert torch.equal(meaning[texture[field]], labels[field])

    def test_without_the_legend_nothing_does(self, extent):
        """Another deal, and the same mosaic is of other classes."""
        first, second = (
            extent.draw(torch.tensor(meaning), 32, generator(7))
            for meaning in ([0, 0, 1, 1, 2, 2, 3, 3], [1, 0, 1, 2, 3, 2, 3, 0])
        )
        field = first[1] != extent.NO_CLASS
        assert torch.equal(first[0][field], second[0][field])
        assert not torch.equal(first[0][:2, :16], second[0][:2, :16])
        texture, _ = read(extent, first[0])
        moved = torch.isin(texture[field], torch.tensor([0, 3, 4, 7]))
        assert torch.equal((first[1] != second[1])[field], moved)

    def test_every_texture_is_of_every_class_as_often(self, extent):
        """Over 4000 deals, within 5 standard deviations (0.034)."""
        source = generator(0)
        deals = torch.stack([extent.deal(source) for _ in range(4000)])
        share = torch.nn.functional.one_hot(deals).double().mean(0)
        np.testing.assert_allclose(share, 0.25, atol=0.034)

    def test_they_are_the_generators(self, extent):
        meaning = extent.deal(generator(3))
        assert torch.equal(meaning, extent.deal(generator(3)))
        images = [extent.draw(meaning, 16, generator(n)) for n in (3, 3, 4)]
        assert torch.equal(images[0][0], images[1][0])
        assert not torch.equal(images[0][1], images[2][1])

    @pytest.mark.parametrize('side', [16, 18, 64])
    def test_the_legend_stays_as_large(self, extent, side):
        meaning = extent.deal(generator(5))
        tokens, labels = extent.draw(meaning, side, generator(5))
        assert tokens.shape == (side, side, extent.CHANNELS)
        assert tokens.dtype == torch.float32
        shown = tokens[..., extent.NUM_TEXTURES :].amax(-1) > 0.7
        assert shown[:2, :16].all() and shown.sum() == 32
        assert torch.equal(labels == extent.NO_CLASS, shown)

    def test_the_mosaic_is_of_squares(self, extent):
        tokens, _ = extent.draw(extent.deal(generator(1)), 64, generator(1))
        texture, _ = read(extent, tokens)
        squares = texture[4:].view(15, 4, 16, 4).transpose(1, 2).flatten(2)
        assert (squares == squares[..., :1]).all()
        assert squares[..., 0].unique().tolist() == list(range(8))


def cells(outcome):
    """The table that the tool printed, rows of cells."""
    assert outcome.status == 0, outcome.err
    header, rule, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in outcome.out.splitlines()
    )
    assert rule == ['---'] * len(header)
    return header, rows


SMALL = ('--iters', 2, '--tokens', 256, 400)


def test_a_row_for_each_variant(tool):
    header, rows = cells(
        tool(TOOL, *SMALL, '--softmax-max-tokens', 300, '--seed', 3)
    )
    assert header == ['variant', '256', '400']
    names = ['neumann', 'neumann-fixed', 'softmax', 'linear']
    assert [row[0] for row in rows] == names
    for name, small, large in rows:
        assert 0 <= float(small) <= 1
        assert (large == '-') == (name == 'softmax')


def test_training_is_the_seeds(extent):
    device = torch.device('cpu')
    first, again, other = (
        extent.train('neumann', 16, 1, seed, device) for seed in (1, 1, 2)
    )
    weights = [network.body[0].weight for network in (first, again, other)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
    refs = [
        module.num_tokens_ref.item()
        for module in first.modules()
        if isinstance(module, LandmarkInfSA)
    ]
    assert refs == [256] * extent.NUM_LAYERS


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tokens', 64], '64 tokens make no square of 16 x 16 or more'),
        (['--tokens', 300], '300 tokens make no square'),
        (['--iters', 0], "'0' is no positive integer"),
        (['--device', 'abacus'], "'abacus' is not there to compute on"),
        (['--variants', 'quick'], "invalid choice: 'quick'"),
    ],
)
def test_wrong_arguments_are_one_line(tool, arguments, message):
    outcome = tool(TOOL, *arguments)
    assert outcome.status == 2 and not outcome.out
    assert message in outcome.err.splitlines()[-1]


@pytest.mark.slow
def test_the_temperature_carries_over(extent, monkeypatch):
    """Trained on 256 tokens, still right on 64 times as many.

    Without the temperature the same weights are not.
    """
    device = torch.device('cpu')
    network = extent.train('neumann', 16, 600, 0, device)
    small, large = (extent.accuracy(network, n, device) for n in (16, 128))
    assert small >= 0.99 and large >= 0.99
    for module in network.modules():
        if isinstance(module, LandmarkInfSA):
            module.log_n = False
    monkeypatch.setattr(extent, 'TEST_IMAGES', 4)
    assert extent.accuracy(network, 256, device) < 0.95
