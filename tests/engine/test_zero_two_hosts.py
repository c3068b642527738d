# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""One image on two hosts: network namespaces with addresses of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from mmengine.registry import init_default_scope

pytest.importorskip('deepspeed')

from . import zero_spatial_process
from .processes import CPU, REPO
from .test_zero_spatial import LANDMARK, assert_plain, case

# Names that a run which was killed has not left behind.
HOSTS = {
    f'infsa-{os.getpid()}-a': '10.211.7.1',
    f'infsa-{os.getpid()}-b': '10.211.7.2',
}
CASES = [case(2, **LANDMARK)]


def ip(*args):
    subprocess.run(['ip', *args], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two namespaces, joined by a cable."""
    if shutil.which('ip') is None:
        pytest.skip('there is no ip command')
    first = next(iter(HOSTS))
    try:
        ip('netns', 'add', first)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode()
        assert 'ermission denied' in reason or 'not permitted' in reason
        pytest.skip(f'namespaces are not allowed: {reason}')
    try:
        first, second = HOSTS
        ip('netns', 'add', second)
        ip(
            *('link', 'add', 'cable', 'netns', first),
            *('type', 'veth', 'peer', 'name', 'cable', 'netns', second),
        )
        for name, address in HOSTS.items():
            ip('-n', name, 'address', 'add', f'{address}/24', 'dev', 'cable')
            ip('-n', name, 'link', 'set', 'cable', 'up')
            ip('-n', name, 'link', 'set', 'lo', 'up')
        yield HOSTS
    finally:
        for name in HOSTS:
            subprocess.run(['ip', 'netns', 'del', name], capture_output=True)


def start(name, address, root):
    """One of the two nodes; the first of them is where they meet."""
    meeting = next(iter(HOSTS.values()))
    return subprocess.Popen(
        [
            *('ip', 'netns', 'exec', name),
            *(sys.executable, '-m', 'torch.distributed.run'),
            *('--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d'),
            f'--rdzv-endpoint={meeting}:29500',
            # Both have the name of the machine, which says nothing here.
            f'--rdzv-conf=is_host={int(address == meeting)}',
            f'--local-addr={address}',
            zero_spatial_process.__file__,
            str(root),
            '2',
        ],
        cwd=REPO,
        env=os.environ | CPU | {'GLOO_SOCKET_IFNAME': 'cable'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def sent(name):
    """Bytes that a host has put on the cable."""
    out = subprocess.run(
        ['ip', '-j', '-s', '-n', name, 'link', 'show', 'cable'],
        check=True,
        capture_output=True,
    ).stdout
    return json.loads(out)[0]['stats64']['tx']['bytes']


def test_zero_2_with_a_band_on_each_host(hosts, tmp_path):
    init_default_scope('mmseg')
    (tmp_path / 'cases.json').write_text(json.dumps(CASES))
    nodes = [start(name, address, tmp_path) for name, address in hosts.items()]
    try:
        outputs = [node.communicate(timeout=600)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    for node, out in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, out[-4000:]
    results = torch.load(tmp_path / 'results.pt', weights_only=True)
    assert_plain(results[CASES[0]['name']], CASES[0])
    # Weights of 30 kB travel at least once in each step.
    assert min(sent(name) for name in hosts) > 5 * 30_000
