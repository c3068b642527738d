# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the ranks of a spatial group are asked to do, and how they start.

All cases of one size of group share their processes: starting those takes
longer than the cases.
"""

import copy
import datetime
import math
import multiprocessing
import pickle
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F

from infsa_seg.execution import (
    Grid,
    ParallelDims,
    SpatialParallel,
    communication,
    spatial_forward,
)
from infsa_seg.models import BandSegHead, InfViT
from infsa_seg.models.segmentors import spatial_loss
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import CountState

from .networks import PATCH, segmentor

# A rank that waits longer for another has been left alone.
TIMEOUT = 60
ROOT = Path(__file__).parents[2]
IGNORE = 255
HEAD = dict(
    type='BandSegHead',
    in_channels=[24, 24],
    in_index=[0, 1],
    channels=16,
    num_classes=5,
    num_upsamples=1,
    dropout_ratio=0,
    loss_decode=dict(type='BandCrossEntropyLoss', max_logits=5000),
)
DICE = dict(type='BandDiceLoss', max_logits=20_000, loss_weight=3.0)
HARD = dict(thresh=0.1, min_kept=700)  # for each of two images
LISTS = {
    'dice': [DICE, dict(DICE, per_image=True, loss_name='loss_images')],
    'ohem': [
        dict(type='BandCrossEntropyLoss', max_logits=20_000, ohem=HARD),
        DICE,
    ],
}


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
    dist.all_reduce(total, group=parallel.group)
    close(total, loss.detach())
    compare_gradients(parallel, model, alone)
    for name, buffer in alone.named_buffers():
        if recompute and name.endswith('num_dead'):
            continue  # counts a recomputed layer twice, bands or not
        assert buffer.equal(model.get_buffer(name)), name


def compare_gradients(parallel, model, alone):
    """Sum the gradients of all ranks; they are those of the whole image."""
    for name, parameter in alone.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            dist.all_reduce(grad, group=parallel.group)
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


def losses_equal_one_process(parallel, only_ignored=False, losses=None):
    """The head's own losses, in strips, and its accuracy; float64."""
    head = HEAD | (dict(loss_decode=LISTS[losses]) if losses else {})
    model = segmentor('neumann', head=head, kind='BandEncoderDecoder')
    model = model.double().train()
    alone = copy.deepcopy(model)
    model.backbone.with_cp = True
    height, width = 53, 37
    rows = parallel.rows(Grid(height, width, PATCH).rows)
    rows = slice(*Grid(height, width, PATCH).pixel_rows(rows))
    pixels = torch.randn(2, 3, height, width, dtype=torch.float64)
    label = torch.randint(5, (2, height, width))
    # The first rank has no label at all.
    label[:, : height if only_ignored else 24] = IGNORE
    label[0][label[0] == 3] = 1

    logits = plain_logits(alone, pixels)
    wanted = plain_losses(logits, label, losses)
    if only_ignored:
        wanted = {name: logits.sum() * 0 for name in wanted}
    sum(wanted.values()).backward()
    shares = spatial_loss(
        model, pixels[:, :, rows], label[:, rows], height, parallel
    )
    accuracy = shares.pop('acc_seg')
    assert shares.keys() == wanted.keys()
    sum(shares.values()).backward()
    for name, share in shares.items():
        total = share.detach().clone()
        dist.all_reduce(total, group=parallel.group)
        close(total, wanted[name].detach(), name)
    compare_gradients(parallel, model, alone)
    right = logits.argmax(1) == label
    valid = (label != IGNORE).sum()
    close(accuracy[0], 100.0 * right.sum().double() / valid.clamp(1))


def plain_losses(logits, label, losses):
    """What the losses of ``LISTS`` are, of all logits."""
    valid = label != IGNORE
    each = F.cross_entropy(
        logits, label, ignore_index=IGNORE, reduction='none'
    )
    if losses is None:
        return {'loss_ce': each.sum() / valid.sum()}
    p = logits.softmax(1) * valid[:, None]
    t = F.one_hot(label.where(valid, 0), 5).movedim(3, 1) * valid[:, None]

    def dice(dims):
        present = t.sum(dims) > 0
        squares = (p**2 + t).sum(dims) + 2e-3
        return 3 * (1 - 2 * (p * t).sum(dims) / squares)[present].mean()

    if losses == 'dice':
        return {'loss_dice': dice((0, 2, 3)), 'loss_images': dice((2, 3))}
    hardness = each.detach().masked_fill(~valid, -1)
    kept = valid & (each.detach() > -math.log(HARD['thresh']))
    if valid.sum() > 0:
        # By rank: fewer are below the threshold.
        assert kept.sum() < 2 * HARD['min_kept'] < valid.sum()
        last = hardness.flatten().kthvalue(
            label.numel() + 1 - 2 * HARD['min_kept']
        )
        kept |= hardness >= last.values - 1e-12
    return {
        'loss_ce': (each * kept).sum() / kept.sum(),
        'loss_dice': dice((0, 2, 3)),
    }


def counted(parallel, attention, size, recompute):
    """What :func:`communication` says against what was sent."""
    model = segmentor(attention, 'dwconv', 1).train()
    network = SegmentorNetwork(model)
    height, width = size
    grid = Grid(height, width, PATCH)
    pixels = torch.randn(2, 3, height, width)
    rows = slice(*grid.pixel_rows(parallel.rows(grid.rows)))
    parallel.traffic.reset()
    spatial_forward(
        network, pixels[:, :, rows], height, parallel, recompute=recompute
    ).resize().sum().backward()
    said = communication(
        network, height, width, parallel.size, parallel.rank, 2, recompute
    )
    sent = parallel.traffic
    assert sent.merges.elements == said.merges, (sent, said)
    assert sent.halos.elements == said.halos, (sent, said)
    assert sent.bytes_per_step == 4 * (said.merges + said.halos)
    return sent.merges, sent.halos


def random_numbers(parallel):
    """The next random numbers, of ranks that began with others."""
    torch.manual_seed(parallel.rank)
    parallel.share_random_state(torch.device('cpu'))
    return torch.rand(3).tolist()


def meshes(parallel):
    """Groups from a mesh, whole and by axis."""
    dims = ParallelDims(parallel.size, parallel.size)
    mesh = dims.mesh('cpu')
    for given in (mesh, mesh['spatial'], mesh.get_group('spatial')):
        group = SpatialParallel(given)
        assert (group.rank, group.size) == (parallel.rank, parallel.size)
        total = group.merge(CountState(torch.ones(1) * (group.rank + 1)))
        assert total.count == sum(range(1, group.size + 1))
    alone = SpatialParallel(ParallelDims(parallel.size).mesh('cpu')['spatial'])
    assert alone.size == 1
    equals_one_process(alone, 'neumann')
    try:
        ParallelDims(99).mesh('cpu')
    except ValueError as error:
        assert 'world_size=99' in str(error)
    else:
        raise AssertionError('a mesh of other ranks was made')


def refusals(parallel):
    """Every rank refuses, so that none waits for another."""
    network = SegmentorNetwork(segmentor('neumann'))
    messages = []
    for rows, height in ((PATCH, PATCH), (5, 40)):
        try:
            spatial_forward(
                network, torch.zeros(1, 3, rows, 16), height, parallel
            )
        except ValueError as error:
            messages.append(str(error))
    try:
        parallel.halo(torch.zeros(1, 9, 2, 1), 1, 6)
    except ValueError as error:
        messages.append(str(error))
    return messages


def two_data_ranks(parallel):
    """Two groups of two beside each other, each on its own image."""
    mesh = ParallelDims(4, 2).mesh('cpu')
    torch.manual_seed(mesh.get_local_rank('data'))
    equals_one_process(SpatialParallel(mesh), 'linear', masked=True)


def table_row(size):
    """A line of the table of communication volumes, in millions."""
    said = {}
    for variant in ('linear', 'neumann'):
        with torch.device('meta'):
            backbone = InfViT(
                'l4', ffn='dwconv', attn_cfg=dict(variant=variant)
            )
            head = BandSegHead(
                in_channels=[1024], in_index=[0], channels=256, num_classes=8
            )
        model = SimpleNamespace(backbone=backbone, decode_head=head)
        said[variant] = communication(
            SegmentorNetwork(model), 4096, 4096, size, size // 2
        )
    linear, neumann = said.values()
    merges = [(s.sent - s.halos) / 1e6 for s in (linear, neumann)]
    return (
        f'| {size} | {merges[0]:.2f} | {merges[1]:.2f} | '
        f'{linear.halos / 1e6:.2f} | {linear.ulysses / 1e6:.0f} | '
        f'{linear.ring / 1e6:.0f} |'
    )
