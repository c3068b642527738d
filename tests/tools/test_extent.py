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
    """What each token shows, and what the legend says of each texture."""
    texture = tokens[:, : extent.NUM_TEXTURES].argmax(-1)
    mark = tokens[:, extent.NUM_TEXTURES :].argmax(-1)
    entries = zip(
        texture[: extent.LEGEND].tolist(),
        mark[: extent.LEGEND].tolist(),
        strict=True,
    )
    return texture, sorted(set(entries))


class TestImages:
    def test_the_legend_decides(self, extent):
        for seed in range(50):
            source = generator(seed)
            tokens, labels = extent.draw(extent.deal(source), 256, source)
            texture, entries = read(extent, tokens)
            # One class for each texture, and none left out.
            assert [t for t, _ in entries] == list(range(extent.NUM_TEXTURES))
            meaning = torch.tensor([c for _, c in entries])
            assert meaning.bincount().tolist() == [2, 2, 2, 2]
            field = texture[extent.LEGEND :]
            assert len(field) == 256 - extent.LEGEND
            assert torch.equal(meaning[field], labels)

    def test_without_the_legend_nothing_does(self, extent):
        """Another deal, and the same field is of other classes."""
        first, second = (
            extent.draw(torch.tensor(meaning), 256, generator(7))
            for meaning in ([0, 0, 1, 1, 2, 2, 3, 3], [1, 0, 1, 2, 3, 2, 3, 0])
        )
        legend = extent.LEGEND
        assert torch.equal(first[0][legend:], second[0][legend:])
        assert not torch.equal(first[0][:legend], second[0][:legend])
        texture, _ = read(extent, first[0])
        moved = torch.isin(texture[legend:], torch.tensor([0, 3, 4, 7]))
        assert torch.equal(first[1] != second[1], moved)

    def test_every_texture_is_of_every_class_as_often(self, extent):
        """Over 4000 deals, within 5 standard deviations (0.034)."""
        source = generator(0)
        deals = torch.stack([extent.deal(source) for _ in range(4000)])
        share = torch.nn.functional.one_hot(deals).double().mean(0)
        np.testing.assert_allclose(share, 0.25, atol=0.034)

    def test_they_are_the_generators(self, extent):
        meaning = extent.deal(generator(3))
        assert torch.equal(meaning, extent.deal(generator(3)))
        images = [extent.draw(meaning, 64, generator(n)) for n in (3, 3, 4)]
        assert torch.equal(images[0][0], images[1][0])
        assert not torch.equal(images[0][1], images[2][1])

    def test_the_legend_stays_as_large(self, extent):
        for num_tokens in (64, 1024):
            meaning = extent.deal(generator(5))
            tokens, labels = extent.draw(meaning, num_tokens, generator(5))
            assert tokens.shape == (num_tokens, extent.CHANNELS)
            assert tokens.dtype == torch.float32
            shown = tokens[:, extent.NUM_TEXTURES :].amax(-1) > 0.5
            legend = extent.LEGEND
            assert shown.nonzero().flatten().tolist() == list(range(legend))
            assert labels.shape == (num_tokens - legend,)


def cells(outcome):
    """The table that the tool printed, rows of cells."""
    assert outcome.status == 0, outcome.err
    header, rule, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in outcome.out.splitlines()
    )
    assert rule == ['---'] * len(header)
    return header, rows


SMALL = ('--iters', 2, '--tokens', 64, 256)


def test_a_row_for_each_variant(tool):
    header, rows = cells(
        tool(TOOL, *SMALL, '--softmax-max-tokens', 100, '--seed', 3)
    )
    assert header == ['variant', '64', '256']
    names = ['neumann', 'neumann-fixed', 'softmax', 'linear']
    assert [row[0] for row in rows] == names
    for name, small, large in rows:
        assert 0 <= float(small) <= 1
        assert (large == '-') == (name == 'softmax')


def test_training_is_the_seeds(extent):
    device = torch.device('cpu')
    first, again, other = (
        extent.train('neumann', 64, 1, seed, device) for seed in (1, 1, 2)
    )
    weights = [network.body[0].weight for network in (first, again, other)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
    refs = [
        module.num_tokens_ref.item()
        for module in first.modules()
        if isinstance(module, LandmarkInfSA)
    ]
    assert refs == [64] * extent.NUM_LAYERS


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tokens', 16], '16 tokens leave no field beside the legend'),
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
def test_the_temperature_carries_over(extent):
    """Trained on 256 tokens, still right on 64 times as many.

    Without the temperature the same weights are not.
    """
    device = torch.device('cpu')
    network = extent.train('neumann', 256, 1200, 0, device)
    small, large = (extent.accuracy(network, n, device) for n in (256, 16_384))
    # How well it carries over differs with the machine, by its threads alone.
    assert small >= 0.97 and large >= 0.7
    for module in network.modules():
        if isinstance(module, LandmarkInfSA):
            module.log_n = False
    assert extent.accuracy(network, 16_384, device) < large - 0.1
