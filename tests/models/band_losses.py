# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What the tests of losses in strips share: inputs, bands, a counter."""

import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infsa_seg.ops import Axis, Place, Rows
from infsa_seg.ops.state import merge_all

IGNORE = 255


def draw(size, stride, classes=5, batch=2, dtype=torch.float64, ignored=0.2):
    """Logits that need a gradient, and labels of ``stride`` times the size."""
    logits = torch.randn(batch, classes, *size, dtype=dtype) * 3
    label = torch.randint(classes, (batch, *(int(s * stride) for s in size)))
    label[torch.rand(label.shape) < ignored] = IGNORE
    return logits.requires_grad_(), label


def resized(logits, label):
    return F.interpolate(
        logits, size=label.shape[1:], mode='bilinear', align_corners=False
    )


def equal(value, wanted, logits, tolerance=1e-10):
    """Compare two losses, and their gradients; return the gradient."""
    torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
    (grad,) = torch.autograd.grad(3 * value, logits)
    (wanted,) = torch.autograd.grad(3 * wanted, logits)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=tolerance)
    return wanted


def in_bands(loss, logits, label, cuts):
    """The terms of bands of pixel rows, which end at ``cuts`` and the border.

    A thread stands for the rank that holds a band; what they merge stays in
    one graph. Their losses are added up.
    """
    height, width = label.shape[1:]
    rows = sorted({0, height, *(cut for cut in cuts if 0 < cut < height)})
    bands = [Rows(*pair) for pair in itertools.pairwise(rows)]
    barrier = threading.Barrier(len(bands), timeout=60)
    states = [None] * len(bands)

    def terms(index):
        band = bands[index]

        def merge(state):
            states[index] = state
            barrier.wait()
            merged = merge_all(states)
            barrier.wait()
            return merged

        down = Axis(0, logits.shape[2], height)
        source = down.source(band)
        place = Place(
            down._replace(first=source.start),
            Axis(0, logits.shape[3], width),
            (band.start, 0),
        )
        try:
            return loss.terms(
                logits[:, :, slice(*source)],
                label[:, slice(*band)],
                IGNORE,
                place,
                merge,
            )
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(bands)) as pool:
        results = list(pool.map(terms, range(len(bands))))
    assert all(r.accuracy.equal(results[0].accuracy) for r in results)
    return sum(r.loss for r in results)


class PeakElements(TorchDispatchMode):
    """The most elements of new floating-point storages alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = 0, 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, before)
        return result

    def _add(self, tensor, before):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not tensor.is_floating_point() or key in before | self.seen:
            return
        size = storage.nbytes() // tensor.element_size()
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.seen.discard(key)
        self.alive -= size
