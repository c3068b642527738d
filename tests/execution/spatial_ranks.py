# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the ranks of a spatial group are asked to do, and how they start.

All cases of one size of group share their processes: starting those takes
longer than the cases.
"""

import copy
import datetime
import multiprocessing
import pickle
import traceback

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F

from infsa_seg.execution import Grid, SpatialParallel, spatial_forward
from infsa_seg.models.utils import SegmentorNetwork

from .networks import PATCH, segmentor

# A rank that waits longer for another has been left alone.
TIMEOUT = 60
IGNORE = 255


def run_ranks(cases, size, folder):
    """Run cases on ``size`` processes.

    Args:
        cases: name to (function, arguments); a function is called on every
            rank with a :class:`SpatialParallel` before its arguments.
        size: of the group.
        folder: an empty one.

    Returns:
        name to a list of what the ranks returned: a value, or the text of
        an error.
    """
    # One server imports everything once, and no rank inherits a thread.
    multiprocessing.set_forkserver_preload([__name__])
    context = mp.start_processes(
        _work,
        (cases, size, str(folder)),
        nprocs=size,
        join=False,
        start_method='forkserver',
    )
    try:
        # True when all have ended.
        while not context.join(timeout=4 * TIMEOUT):
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    results = {}
    for rank in range(size):
        with open(folder / f'{rank}.pkl', 'rb') as file:
            for name, value in pickle.load(file).items():
                results.setdefault(name, []).append(value)
    return results


def _work(rank, cases, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        'gloo',
        init_method=f'file://{folder}/store',
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    results = {}
    for name, (function, arguments) in cases.items():
        torch.manual_seed(0)
        try:
            results[name] = function(SpatialParallel(), *arguments)
        except Exception:
            results[name] = traceback.format_exc()
            # Others may be waiting: nothing after this can be trusted.
            break
    with open(f'{folder}/{rank}.pkl', 'wb') as file:
        pickle.dump(results, file)
    dist.destroy_process_group()


def equals_one_process(
    parallel,
    attention,
    ffn='dwconv',
    num_upsamples=1,
    size=(53, 37),
    masked=False,
    recompute=False,
):
    """Logits, loss and gradients against the whole image, in float64."""
    model = segmentor(attention, ffn, num_upsamples).double().train()
    model.decode_head.dropout = None
    alone = copy.deepcopy(model)
    batch, (height, width) = 2, size
    grid = Grid(height, width, PATCH)
    pixels = torch.randn(batch, 3, height, width, dtype=torch.float64)
    label = torch.randint(5, (batch, height, width))
    label[torch.rand(label.shape) < 0.2] = IGNORE
    mask = None
    if masked:
        # Another share in each band; one of them keeps a single token.
        mask = torch.rand(batch, *grid.shape) < 0.7
        mask[:, : parallel.bands(grid.rows)[0].stop] = False
        mask[:, 0, 1] = True
        hidden = ~mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
        label[hidden[:, :height, :width]] = IGNORE

    logits = plain_logits(alone, pixels, mask)
    count = (label != IGNORE).sum()
    loss = cross_entropy(logits, label) / count
    loss.backward()

    band = parallel.rows(grid.rows)
    rows = slice(*grid.pixel_rows(band))
    result = spatial_forward(
        SegmentorNetwork(model),
        pixels[:, :, rows],
        height,
        parallel,
        None if mask is None else mask[:, slice(*band)],
        recompute,
    )
    mine = result.resize()
    share = cross_entropy(mine, label[:, rows]) / count
    share.backward()

    seen = label[:, None, rows].expand_as(mine) != IGNORE
    close(mine[seen], logits[:, :, rows][seen])
    total = share.detach().clone()
    dist.all_reduce(total)
    close(total, loss.detach())
    compare_gradients(model, alone)
    for name, buffer in alone.named_buffers():
        if recompute and name.endswith('num_dead'):
            continue  # counts a recomputed layer twice, bands or not
        assert buffer.equal(model.get_buffer(name)), name


def compare_gradients(model, alone):
    """Sum the gradients of all ranks; they are those of the whole image."""
    for name, parameter in alone.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            dist.all_reduce(grad)
            close(grad, parameter.grad, name)


def plain_logits(model, pixels, mask=None):
    """Of one process, (B, classes, height, width)."""
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, (0, -width % PATCH, 0, -height % PATCH))
    taps = model.backbone(padded, valid=mask)
    logits = model.decode_head(taps, valid=mask)
    logits = F.interpolate(logits, size=padded.shape[2:], mode='bilinear')
    return logits[:, :, :height, :width]


def cross_entropy(logits, label):
    return F.cross_entropy(logits, label, ignore_index=IGNORE, reduction='sum')


def close(value, wanted, name=''):
    torch.testing.assert_close(
        value, wanted, rtol=0, atol=1e-10, msg=lambda m: f'{name}: {m}'
    )
