# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Killed runs go on from the last sweep that they completed."""

import json
import os

import pytest
import torch

from infsa_seg.execution import Journal, Layout, Streaming, TensorImage
from infsa_seg.models.utils import ClassifierNetwork, SegmentorNetwork

from .networks import classifier, segmentor

IDENTITY = {'model': 'a', 'image': 'b'}


class Killed(BaseException):
    """Nothing cleans up after it here."""


def run(network, folder, stop_after=None, reopened=False):
    """Run with a journal; be killed after so many bands, if at all.

    Returns:
        Logits by position, or None if killed; bands that were run.
    """
    journal = Journal(folder, IDENTITY)
    if not reopened:
        journal.begin()
    bands = 0

    def on_band():
        nonlocal bands
        bands += 1
        if bands == stop_after:
            raise Killed

    torch.manual_seed(1)
    image = TensorImage(torch.randn(1, 3, 75, 51))
    layout = Layout(10, 7)
    tokens = journal.store('tokens', layout, 24, torch.float32)
    taps = None
    if isinstance(network, SegmentorNetwork):
        taps = journal.store('taps', layout, 16, torch.float32)
    streaming = Streaming(
        *(network, image, tokens, taps, 4),
        on_band=on_band,
        journal=journal,
    )
    logits = []
    try:
        if taps is None:
            logits.append(streaming.classify())
        else:
            streaming.run(
                lambda rows, pieces: logits.extend(
                    p.logits.clone() for p in pieces
                )
            )
    except Killed:
        return None, bands
    journal.end()
    return torch.cat(logits, 1), bands


NETWORKS = {
    'segmentor': lambda attention: SegmentorNetwork(segmentor(attention)),
    'classifier': lambda attention: ClassifierNetwork(classifier(attention)),
}


@pytest.mark.parametrize('kind', NETWORKS)
@pytest.mark.parametrize('attention', ['linear', 'neumann', 'row-inf'])
def test_killed_anywhere_goes_on_bit_for_bit(kind, attention, tmp_path):
    network = NETWORKS[kind](attention)
    whole, total = run(network, tmp_path / 'whole')
    assert not (tmp_path / 'whole').exists()
    num_bands = 3
    for stop in range(1, total + 1, 2):
        folder = tmp_path / str(stop)
        assert run(network, folder, stop) == (None, stop)
        sweeps = min((stop - 1) // num_bands, total // num_bands - 1)
        if not Journal(folder, IDENTITY).reopen():
            assert sweeps == 0
            continue
        assert sweeps > 0
        logits, bands = run(network, folder, reopened=True)
        assert logits.equal(whole)
        assert bands == total - sweeps * num_bands
        assert not folder.exists()


def test_killed_twice(tmp_path):
    network = SegmentorNetwork(segmentor('linear'))
    whole, total = run(network, tmp_path / 'whole')
    folder = tmp_path / 'run'
    run(network, folder, 8)
    for _ in range(3):
        # Two bands further than the sweep: it is done again each time.
        assert run(network, folder, 5, reopened=True)[0] is None
    logits, bands = run(network, folder, reopened=True)
    assert logits.equal(whole)
    assert bands < total - 9


def test_another_run_is_refused(tmp_path):
    network = SegmentorNetwork(segmentor())
    run(network, tmp_path / 'run', 5)
    other = Journal(tmp_path / 'run', {**IDENTITY, 'model': 'c'})
    with pytest.raises(ValueError, match='by a run with another model; give'):
        other.reopen()
    with pytest.raises(FileExistsError, match='--resume'):
        Journal(tmp_path / 'run', IDENTITY).begin()
    Journal(tmp_path / 'run', IDENTITY).begin(anew=True)
    assert not Journal(tmp_path / 'run', IDENTITY).reopen()


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    folder = tmp_path / 'run'
    journal = Journal(folder, IDENTITY)
    journal.begin()
    note = folder / 'run.json'
    content = json.loads(note.read_text())
    assert content['process'] == os.getpid()
    # One that surely runs, and is not this one.
    note.write_text(json.dumps({**content, 'process': os.getppid()}))
    (folder / 'progress.pt').touch()
    for attempt in (journal.reopen, lambda: journal.begin(anew=True)):
        with pytest.raises(FileExistsError, match='in use by process'):
            attempt()
    note.write_text('half a no')
    journal.begin(anew=True)


def test_disk_without_space(tmp_path, monkeypatch):
    """Known before the first band."""

    def full(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'posix_fallocate', full)
    journal = Journal(tmp_path / 'run', IDENTITY)
    journal.begin()
    with pytest.raises(OSError, match=r'No space left .*tokens\.0'):
        journal.store('tokens', Layout(10, 7), 24, torch.float32)
