# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The shell scripts that start processes, with stand-ins for launchers."""

import os
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / 'tools'
SCRIPTS = ('dist_train.sh', 'slurm_train.sh', 'ds_train.sh')
LAUNCHERS = ('python', 'srun', 'deepspeed')


@pytest.fixture
def start(tmp_path):
    """Run a script; its status, messages, and what the launcher was told."""
    record = tmp_path / 'record'
    for name in LAUNCHERS:
        program = tmp_path / name
        program.write_text(
            '#!/bin/sh\n'
            f'{{ echo {name}; echo "port $MASTER_PORT"; '
            f'for word in "$@"; do echo "$word"; done; }} > {record}\n'
            'exit 3\n'
        )
        program.chmod(0o755)

    def run(script, *args, **env):
        record.unlink(missing_ok=True)
        kept = {k: os.environ[k] for k in ('HOME',) if k in os.environ}
        done = subprocess.run(
            ['bash', TOOLS / script, *args],
            env={**kept, 'PATH': f'{tmp_path}:{os.defpath}', **env},
            capture_output=True,
            text=True,
            check=False,
        )
        told = record.read_text().splitlines() if record.exists() else []
        return done.returncode, done.stderr, told

    return run


@pytest.mark.parametrize('script', SCRIPTS)
def test_scripts_are_bash_and_stop_at_the_first_error(script):
    subprocess.run(['bash', '-n', TOOLS / script], check=True)
    assert os.access(TOOLS / script, os.X_OK)
    assert 'set -euo pipefail' in (TOOLS / script).read_text().splitlines()


@pytest.mark.parametrize(
    ('script', 'args'),
    [
        ('dist_train.sh', ()),
        ('dist_train.sh', ('c.py',)),
        ('dist_train.sh', ('c.py', '--zero-stage')),
        ('dist_train.sh', ('c.py', '0')),
        ('slurm_train.sh', ('queue', 'job')),
        ('ds_train.sh', ()),
        ('ds_train.sh', ('--zero-stage', '2')),
    ],
)
def test_wrong_arguments_get_a_usage_line(start, script, args):
    status, message, told = start(script, *args)
    assert status == 2
    assert message.startswith('usage: ')
    assert not told


def test_torchrun_is_told_of_nodes_and_the_rest_goes_on(start):
    options = ('--work-dir', 'two words', '--zero-stage', '2')
    status, _, told = start(
        'dist_train.sh',
        *('c.py', '4', *options),
        NNODES='2',
        NODE_RANK='1',
        MASTER_ADDR='first',
        PORT='29511',
    )
    assert status == 3  # that of the launcher
    assert told[2:] == [
        *('-m', 'torch.distributed.run'),
        *('--nnodes=2', '--node_rank=1', '--nproc_per_node=4'),
        *('--rdzv_id=infsa_seg', '--rdzv_backend=c10d'),
        '--rdzv_endpoint=first:29511',
        *(str(TOOLS / 'train.py'), 'c.py', '--launcher', 'pytorch'),
        *options,
    ]


def test_torchrun_stays_on_one_node_by_default(start):
    _, _, told = start('dist_train.sh', 'c.py', '2')
    assert '--nnodes=1' in told
    assert '--rdzv_endpoint=127.0.0.1:29500' in told
    assert told[-4:] == [
        *(str(TOOLS / 'train.py'), 'c.py', '--launcher', 'pytorch')
    ]


def test_slurm_gets_a_task_for_each_gpu(start):
    status, _, told = start(
        'slurm_train.sh',
        *('queue', 'job', 'c.py', '--resume'),
        GPUS='16',
        GPUS_PER_NODE='4',
        PORT='29512',
        SRUN_ARGS='--exclude=n1 --time=10',
    )
    assert status == 3
    assert told[:2] == ['srun', 'port 29512']
    assert told[2:] == [
        *('-p', 'queue', '--job-name=job', '--gres=gpu:4', '--ntasks=16'),
        *('--ntasks-per-node=4', '--cpus-per-task=5'),
        *('--kill-on-bad-exit=1', '--exclude=n1', '--time=10'),
        *('python', '-u', str(TOOLS / 'train.py'), 'c.py'),
        *('--launcher', 'slurm', '--resume'),
    ]


def test_slurm_asks_for_no_more_gpus_than_there_are_tasks(start):
    _, _, told = start('slurm_train.sh', 'queue', 'job', 'c.py', GPUS='2')
    assert {'--gres=gpu:2', '--ntasks=2', '--ntasks-per-node=2'} <= set(told)


def test_deepspeed_gets_the_hostfile(start, tmp_path):
    hosts = tmp_path / 'hosts'
    hosts.write_text('a slots=8\nb slots=8\n')
    status, _, told = start(
        'ds_train.sh',
        *('c.py', '--zero-stage', '3'),
        HOSTFILE=str(hosts),
        MASTER_ADDR='a',
        DS_ARGS='--include a:0,1',
    )
    assert status == 3
    assert told[0] == 'deepspeed'
    assert told[2:] == [
        *('--hostfile', str(hosts), '--master_addr', 'a'),
        *('--master_port', '29500', '--include', 'a:0,1'),
        *(str(TOOLS / 'train.py'), 'c.py', '--launcher', 'pytorch'),
        *('--zero-stage', '3'),
    ]


def test_a_hostfile_that_is_not_there_is_named(start, tmp_path):
    status, message, told = start(
        'ds_train.sh', 'c.py', HOSTFILE=str(tmp_path / 'none')
    )
    assert status == 2
    assert f'{tmp_path / "none"}: no such hostfile' in message
    assert not told
