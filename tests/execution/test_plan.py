# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is foreseen of a run, and that it is kept."""

import json
import subprocess
import sys

import pytest
import torch

from infsa_seg.execution import (
    Grid,
    Layout,
    RamStore,
    Streaming,
    TensorImage,
    format_bytes,
    make_plan,
    matmul_rate,
    parse_bytes,
    resident_bytes,
)
from infsa_seg.execution.measure import measure
from infsa_seg.models.utils import SegmentorNetwork

from .networks import segmentor


@pytest.mark.parametrize(
    ('text', 'size'),
    [
        ('4GiB', 4 * 2**30),
        ('500MB', 500_000_000),
        ('1.5 kib', 1536),
        ('123', 123),
        (77, 77),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    'text', ['', 'much', '4 parsec', '-1', '0', '.', '1.2.3B', '0.1B', 'GiB']
)
def test_no_amount_of_memory(text):
    with pytest.raises(ValueError, match='is no amount of memory'):
        parse_bytes(text)


def test_format_bytes():
    texts = [format_bytes(n) for n in (5, 2048, 3 * 2**20, 5 * 2**30)]
    assert texts == ['5 B', '2.0 KiB', '3.0 MiB', '5.00 GiB']


@pytest.fixture(scope='module')
def network():
    return SegmentorNetwork(segmentor())


def plan_of(network, size=(512, 512), max_bytes=2**40, **kwargs):
    return make_plan(
        network,
        Grid(*size, 8),
        3,
        max_bytes=max_bytes,
        resident_bytes=0,
        **kwargs,
    )


def test_plan_chooses_store_and_height(network):
    """Memory if there is enough, else files; then lower bands; then none."""
    plenty = plan_of(network, (4096, 4096))
    assert (plenty.store, plenty.band_rows) == ('ram', 32)
    assert plenty.store_bytes == 512 * 512 * (24 + 16) * 4
    assert plenty.scratch_bytes == 0
    assert plenty.num_sweeps == 3 + 1 + 1
    assert plenty.num_bands == 16

    less = plan_of(network, (4096, 4096), plenty.peak_bytes - 1)
    assert less.band_rows < 32 and less.peak_bytes < plenty.peak_bytes
    budget = plan_of(
        network, (4096, 4096), store='disk', band_rows=8
    ).peak_bytes
    files = plan_of(network, (4096, 4096), budget)
    assert files.store == 'disk'
    assert files.scratch_bytes == 2 * plenty.store_bytes
    assert files.peak_bytes <= budget

    with pytest.raises(ValueError, match=r'need .* more than the .* allowed'):
        plan_of(network, (4096, 4096), 10 * 2**20)
    with pytest.raises(ValueError, match='--store disk'):
        plan_of(network, (4096, 4096), 170 * 2**20, store='ram')


def test_memory_hardly_grows_with_the_width(network):
    """Bands of as many tokens, as long as they are not too low."""
    plans = [
        plan_of(network, (4096, width), store='disk')
        for width in (4096, 8192, 16384)
    ]
    assert [plan.band_rows for plan in plans] == [32, 16, 8]
    assert plans[2].peak_bytes < 1.1 * plans[0].peak_bytes
    assert plan_of(network, (4096, 2**20), store='disk').band_rows == 8


def test_plan_obeys(network):
    plan = plan_of(network, store='disk', band_rows=5)
    assert (plan.store, plan.band_rows, plan.num_bands) == ('disk', 5, 13)
    half = plan_of(network, store='ram', store_dtype=torch.bfloat16)
    assert 2 * half.store_bytes == plan.store_bytes


def test_weights_are_not_needed(network):
    """The network may be without numbers; it is not changed."""
    with torch.device('meta'):
        bare = segmentor()
    assert plan_of(SegmentorNetwork(bare)) == plan_of(network)
    assert network.backbone.position.weight.device.type == 'cpu'


@pytest.mark.parametrize(
    ('attention', 'ffn', 'masked'),
    [
        ('linear', 'mlp', False),
        ('linear', 'dwconv', True),
        ('neumann', 'mlp', True),
        ('neumann', 'dwconv', False),
        ('none', 'dwconv', False),
    ],
)
def test_operations_are_those_of_the_run(attention, ffn, masked):
    """Counted over the real thing; within a tenth, image borders aside."""
    from torch.utils.flop_counter import FlopCounterMode

    network = SegmentorNetwork(segmentor(attention, ffn))
    pixels = torch.randn(1, 3, 400, 160)
    cost = measure(network, Grid(400, 160, 8), 3, masked=masked)
    layout = Layout(50, 20)
    stores = [RamStore(layout, width, torch.float32) for width in (24, 16)]
    streaming = Streaming(network, TensorImage(pixels), *stores, band_rows=5)
    counter = FlopCounterMode(display=False)
    with counter:
        streaming.run(lambda rows, pieces: list(pieces))
    # The operations of a band at the border are fewer.
    assert cost.flops(5, 50) == pytest.approx(
        counter.get_total_flops(), rel=0.1
    )


def test_bytes_grow_with_the_band_alone(network):
    """Not with the height of the image."""
    low, high = (measure(network, Grid(h, 512, 8), 3) for h in (256, 8192))
    assert low == high
    sizes = [low.peak_bytes(rows) for rows in (1, 3, 9, 27)]
    assert sizes == sorted(sizes) and sizes[-1] > 2 * sizes[1]


def test_networks_that_differ_are_told_apart(network):
    """In any way that costs; the same one is not measured again."""
    grid = Grid(64, 64, 8)
    costs = [
        measure(SegmentorNetwork(segmentor(*form)), grid, 3, **options)
        for form, options in (
            (('neumann', 'dwconv', 1), {}),
            (('neumann', 'mlp', 1), {}),
            (('neumann', 'dwconv', 2), {}),
            (('neumann-inf', 'dwconv', 1), {}),
            (('linear', 'dwconv', 1), {}),
            (('neumann', 'dwconv', 1), dict(masked=True)),
            (('linear', 'mlp', 1), dict(chunk_tokens=4)),
        )
    ]
    assert len({str(cost) for cost in costs}) == len(costs)
    assert measure(network, grid, 3) is costs[0]


def test_the_importance_of_tokens_is_foreseen():
    """It needs keys and factors of a whole band at once, not of a chunk."""
    model = segmentor('neumann', 'mlp')
    model.backbone.layers[-1].attn.op.with_importance = True
    network, grid = SegmentorNetwork(model), Grid(1024, 4096, 8)
    plain, ranked = (
        measure(network, grid, 3, ranked=ranked) for ranked in (False, True)
    )
    # Of the sweep before decoding, in bands of three rows.
    before, after = (cost.sweep_bytes[1][-2] for cost in (plain, ranked))
    factors = 3 * 512 * 3 * 32 * 4
    assert after > before and after > 2 * factors
    assert ranked.flops(32, 128) > plain.flops(32, 128)


def test_many_classes_do_not_make_large_pieces():
    """Logits at pixel resolution are bounded whatever their number."""
    # In this mode torch resizes by way of many copies.
    torch.use_deterministic_algorithms(False)
    few, many = (
        measure(
            SegmentorNetwork(
                segmentor(
                    head=dict(
                        type='BandSegHead',
                        in_channels=[24],
                        in_index=[1],
                        channels=16,
                        num_classes=classes,
                        num_upsamples=0,
                    )
                )
            ),
            Grid(2048, 2048, 8),
            3,
        ).peak_bytes(8)
        for classes in (2, 1000)
    )
    torch.use_deterministic_algorithms(True)
    # At pixel resolution a band of 1000 classes would be 8 x 8 x 2048 x 4 kB.
    assert many < few + 2**30 / 8


def test_rates_and_residents():
    assert matmul_rate(torch.device('cpu'), torch.float32, 0.01) > 1e8
    assert resident_bytes() > 50 * 2**20


MEASURE = """
import json, sys
from tests.execution.networks import segmentor
import torch
from infsa_seg.execution import *
from infsa_seg.models.utils import SegmentorNetwork
torch.set_num_threads(2)
store, ffn, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
network = SegmentorNetwork(segmentor('neumann', ffn))

class Zeros:
    height = width = size
    def read(self, rows, columns):
        return torch.zeros(1, 3, rows.num_rows, columns.num_rows)
    def read_valid(self, rows, columns):
        return None

grid = Grid(size, size, 8)
plan = make_plan(
    network, grid, 3, max_bytes=2**40, resident_bytes=resident_bytes(),
    store=store, band_rows=16,
)
layout = Layout(*grid.shape)
stores = [RamStore(layout, width, torch.float32) for width in (24, 16)]
if store == 'disk':
    from pathlib import Path
    stores = [
        FileStore(layout, width, torch.float32, Path(sys.argv[4]) / str(width))
        for width in (24, 16)
    ]
Streaming(network, Zeros(), *stores, band_rows=plan.band_rows).run(
    lambda rows, pieces: [None for _ in pieces]
)
# Not ru_maxrss, which begins with what the parent had when it started this.
with open('/proc/self/status') as file:
    (peak,) = (int(x.split()[1]) for x in file if x.startswith('VmHWM'))
peak *= 1024
print(json.dumps([plan.peak_bytes, peak, plan.store_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('store', ['ram', 'disk'])
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_a_run_stays_below_its_plan(store, ffn, tmp_path):
    """Memory of the whole process, at most, and not far below."""
    arguments = [store, ffn, '3072', str(tmp_path)]
    output = subprocess.run(
        [sys.executable, '-c', MEASURE, *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    planned, peak, kept = json.loads(output.splitlines()[-1])
    assert peak <= planned
    assert planned < 2 * peak
    assert kept > 20 * 2**20
