# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""``tools/infer_large.py`` as its users run it."""

import os
import signal
import time

import numpy as np
import pytest

from tests.apis.conftest import REPO
from tests.apis.test_label import CLASSES, write_classifier

rasterio = pytest.importorskip('rasterio')
pytestmark = pytest.mark.filterwarnings('ignore:Dataset has no geotransform')

TOOL = 'infer_large.py'


@pytest.fixture
def raster(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / 'a.npy', rng.integers(0, 255, (900, 300, 3), np.uint8))
    return tmp_path / 'a.npy'


@pytest.fixture
def model(project, trained):
    return project / 'tiny.py', trained / 'iter_30.pth'


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read(1)


def test_every_input_is_tried(tool, model, raster, tmp_path):
    (tmp_path / 'b.png').write_bytes(b'no picture')
    (tmp_path / 'c.npy').write_bytes(raster.read_bytes()[:5000])
    out = tmp_path / 'out'
    outcome = tool(TOOL, *model, tmp_path, 'none.tif', '--out', out)
    assert outcome.status == 1
    assert str(out / 'a_mask.tif') in outcome.out.splitlines()
    reasons = [
        line
        for line in outcome.err.splitlines()
        if line.startswith(f'{TOOL}: failed: ')
    ]
    assert len(reasons) == 3
    for name in ('b.png', 'c.npy', 'none.tif'):
        assert sum(name in line for line in reasons) == 1
    assert 'Traceback' not in outcome.err
    assert [path.name for path in out.iterdir()] == ['a_mask.tif']

    # Nothing is lost without being told so.
    again = tool(TOOL, *model, raster, '--out', out)
    assert again.status == 1
    assert 'exists; use --overwrite' in again.err.splitlines()[-1]
    assert tool(TOOL, *model, raster, '--out', out, '--overwrite').status == 0


def test_all_files_and_a_comparison(tool, model, raster, tmp_path):
    outcome = tool(
        TOOL,
        *model,
        raster,
        *('--out', tmp_path / 'm.tif', '--probs', '--centrality'),
        *('--overview', '--palette', 'ff0000,00ff00,0000ff'),
        *('--verify', '50', '--max-memory', '2GiB', '--band-rows', '4'),
    )
    assert outcome.status == 0, outcome.err
    for name in ('m.tif', 'm_probs.tif', 'm_centrality.tif', 'm_overview.png'):
        assert str(tmp_path / name) in outcome.out.splitlines()
    (line,) = (x for x in outcome.out.splitlines() if 'difference' in x)
    assert float(line.split()[-1]) < 1e-4
    assert 'each of 29 bands of 4 token rows' in outcome.out
    with rasterio.open(tmp_path / 'm.tif') as dataset:
        assert dataset.colormap(1)[0] == (255, 0, 0, 255)


def test_plan_needs_no_weights_and_writes_nothing(
    tool, model, raster, tmp_path
):
    config, _ = model
    outcome = tool(
        TOOL, config, 'no.pth', raster, '--out', tmp_path / 'out', '--plan'
    )
    assert outcome.status == 0, outcome.err
    assert '4,294 (113 x 38)' in outcome.out
    for word in ('sweeps', 'memory', 'scratch', 'output', 'time'):
        assert f'\n  {word} ' in outcome.out
    assert not (tmp_path / 'out').exists()


def wait_for(found, process):
    end = time.monotonic() + 120
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, 'it did not appear'
        time.sleep(0.002)


@pytest.fixture
def slow_run(command, model, tmp_path):
    """A run of many bands, on disk; its command line, and its scratch."""
    np.save(tmp_path / 'a.npy', np.zeros((12_000, 300, 3), np.uint8))
    arguments = [
        REPO / 'tools' / TOOL,
        *model,
        tmp_path / 'a.npy',
        *('--out', tmp_path / 'm.tif', '--store', 'disk'),
        *('--band-rows', '1'),
    ]

    def start(*more):
        return command(*arguments, *more, cwd=tmp_path)

    return start, tmp_path / '.m.scratch'


def test_interrupt_cleans_up(slow_run, tmp_path):
    start, scratch = slow_run
    before = sorted(tmp_path.iterdir())
    process = start()
    wait_for((scratch / 'progress.pt').exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == f'{TOOL}: interrupted'
    assert sorted(tmp_path.iterdir()) == before


def test_killed_then_resumed(slow_run, tool, model, tmp_path):
    start, scratch = slow_run
    process = start()
    wait_for((scratch / 'progress.pt').exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert not (tmp_path / 'm.tif').exists()

    arguments = [*model, tmp_path / 'a.npy', '--out', tmp_path / 'm.tif']
    refused = tool(TOOL, *arguments, '--store', 'disk')
    assert refused.status == 1
    assert 'use --resume to go on from it' in refused.err.splitlines()[-1]
    other = tool(TOOL, *arguments, '--store-dtype', 'bf16', '--resume')
    assert other.status == 1
    assert 'by a run with another dtype' in other.err.splitlines()[-1]

    resumed = tool(TOOL, *arguments, '--resume')
    assert resumed.status == 0, resumed.err
    assert not scratch.exists()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ['a.npy', 'm.tif']
    arguments[-1] = tmp_path / 'whole.tif'
    assert tool(TOOL, *arguments).status == 0
    assert np.array_equal(read(tmp_path / 'm.tif'), read(arguments[-1]))


def test_unwritable_output(tool, model, raster, tmp_path):
    (tmp_path / 'file').touch()
    outcome = tool(TOOL, *model, raster, '--out', tmp_path / 'file' / 'out')
    assert outcome.status == 1
    assert 'Traceback' not in outcome.err
    if os.getuid():  # root writes everywhere
        (tmp_path / 'locked').mkdir(mode=0o500)
        outcome = tool(TOOL, *model, raster, '--out', tmp_path / 'locked')
        assert outcome.status == 1
        assert 'cannot be written' in outcome.err.splitlines()[-1]


def test_a_classifier_says_one_label(tool, raster, tmp_path):
    """As a user runs it; the picture's scores, the best first."""
    config, weights = tmp_path / 'three.py', tmp_path / 'three.pth'
    write_classifier(config, weights)
    outcome = tool(
        TOOL,
        *(config, weights, raster, '--out', tmp_path / 'out'),
        *('--overview', '--verify', '1', '--band-rows', '4'),
    )
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    for kind in ('label.json', 'centrality.tif', 'overview.png'):
        assert str(tmp_path / 'out' / f'a_{kind}') in lines
    (line,) = (x for x in lines if 'difference' in x)
    assert float(line.split()[-1]) < 1e-5
    names, shares = zip(
        *(item.rsplit(' ', 1) for item in lines[-1][7:].split(', ')),
        strict=True,
    )
    assert lines[-1].startswith('label: ') and sorted(names) == sorted(CLASSES)
    numbers = [float(share.rstrip('%')) for share in shares]
    assert numbers == sorted(numbers, reverse=True)
    assert sum(numbers) == pytest.approx(100, abs=0.2)

    refused = tool(
        TOOL, config, weights, raster, '--out', tmp_path / 'no', '--polygons'
    )
    assert refused.status == 1
    assert refused.err.splitlines()[-1].startswith(
        f'{TOOL}: error: --polygons: the model has one label'
    )
    assert not (tmp_path / 'no').exists()
