# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Cross-entropy in strips equals resizing all logits and PyTorch's loss."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infsa_seg.models.losses import BandCrossEntropyLoss

IGNORE = 255


def plain(logits, label, class_weight=None, reduction='mean'):
    fine = F.interpolate(
        logits, size=label.shape[1:], mode='bilinear', align_corners=False
    )
    return F.cross_entropy(
        fine,
        label,
        None if class_weight is None else fine.new_tensor(class_weight),
        ignore_index=IGNORE,
        reduction=reduction,
    )


def draw(size, stride, classes=5, batch=2, dtype=torch.float64):
    logits = torch.randn(batch, classes, *size, dtype=dtype) * 3
    label = torch.randint(classes, (batch, *(int(s * stride) for s in size)))
    label[torch.rand(label.shape) < 0.2] = IGNORE
    return logits.requires_grad_(), label


@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float32, 1e-6), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize('class_weight', [None, [1.0, 0.2, 3.0, 0.0, 0.5]])
@pytest.mark.parametrize('max_logits', [200, 1500, 2**23])
def test_equals_the_plain_loss(dtype, tolerance, class_weight, max_logits):
    """Value and gradient; pieces of few columns, of some rows, of all."""
    logits, label = draw((7, 9), 4, dtype=dtype)
    loss = BandCrossEntropyLoss(class_weight, max_logits=max_logits)
    value, wanted = loss(logits, label), plain(logits, label, class_weight)
    torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
    (grad,) = torch.autograd.grad(3 * value, logits)
    (wanted,) = torch.autograd.grad(3 * wanted, logits)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=tolerance)
    assert wanted.abs().max() > 1e-3


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    stride=st.sampled_from([1, 1.7, 2, 3.5, 4]),
    max_logits=st.integers(600, 20_000),
)
def test_any_size_and_any_pieces(height, width, stride, max_logits):
    """1e-12, float64; also where labels are no multiple of the logits."""
    logits, label = draw((height, width), stride, batch=1)
    label[:, 0, 0] = 1
    value = BandCrossEntropyLoss(max_logits=max_logits)(logits, label)
    wanted = plain(logits, label)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(value, logits)
    (wanted,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


def test_half_precision_is_summed_in_single():
    logits, label = draw((6, 6), 4, dtype=torch.float32)
    half = logits.detach().bfloat16().requires_grad_()
    value = BandCrossEntropyLoss()(half, label)
    assert value.dtype == torch.float32
    wanted = plain(half.float(), label)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)
    value.backward()
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize('avg_non_ignore', [True, False])
def test_only_ignored_pixels(avg_non_ignore):
    logits, label = draw((3, 4), 4)
    label.fill_(IGNORE)
    value = BandCrossEntropyLoss(avg_non_ignore=avg_non_ignore)(logits, label)
    value.backward()
    assert value == 0
    assert logits.grad.eq(0).all()


def test_mean_over_all_pixels_as_mmsegmentation():
    logits, label = draw((3, 4), 4)
    value = BandCrossEntropyLoss(avg_non_ignore=False)(logits, label)
    wanted = plain(logits, label, reduction='sum') / label.numel()
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize('stride', [2, 8])
@pytest.mark.parametrize('max_logits', [20_000, 60_000])
def test_no_more_logits_than_allowed(max_logits, stride):
    """Beside the gradient of the coarse logits, as large as those."""
    size = (96 // stride, 144 // stride)
    logits, label = draw(size, stride, classes=8, dtype=torch.float32)
    with PeakElements() as counter:
        BandCrossEntropyLoss(max_logits=max_logits)(logits, label).backward()
    # The gradient is handed on: its copy times the slope of the loss.
    beside = 2 * logits.numel()
    assert counter.peak <= max_logits + beside
    assert counter.peak >= max_logits / 2
    with PeakElements() as counter:
        plain(logits, label).backward()
    assert counter.peak >= 2 * stride**2 * logits.numel()


def head(**kwargs):
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        return MODELS.build(
            dict(
                type='BandSegHead',
                in_channels=[6],
                in_index=[0],
                channels=8,
                num_classes=4,
                **kwargs,
            )
        )


def test_a_config_can_name_it():
    one = head(loss_decode=dict(type='BandCrossEntropyLoss', max_logits=999))
    other = head(
        loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True)
    )
    taps = (torch.randn(2, 6, 3, 5),)
    samples = []
    for label in draw((3, 5), 16, classes=4)[1]:
        samples.append(SegDataSample())
        samples[-1].gt_sem_seg = PixelData(data=label[None])
    one.eval(), other.eval()
    losses, wanted = (h.loss(taps, samples, {}) for h in (one, other))
    assert losses.keys() == wanted.keys() == {'loss_ce', 'acc_seg'}
    for name in losses:
        torch.testing.assert_close(losses[name], wanted[name])


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(sampler=dict(type='OHEMPixelSampler')), 'sampler'),
        (dict(align_corners=True), 'align_corners'),
        (
            dict(
                loss_decode=[
                    dict(type='BandCrossEntropyLoss'),
                    dict(type='DiceLoss'),
                ]
            ),
            'list',
        ),
    ],
)
def test_what_it_does_not_go_with(options, words):
    band = dict(loss_decode=dict(type='BandCrossEntropyLoss'))
    with pytest.raises(ValueError, match=words):
        head(**(band | options))


def test_errors():
    logits, label = draw((2, 2), 2)
    with pytest.raises(ValueError, match='max_logits=3'):
        BandCrossEntropyLoss(max_logits=3)(logits, label)
    with pytest.raises(ValueError, match='two classes'):
        BandCrossEntropyLoss()(logits[:, :1], label)
    with pytest.raises(ValueError, match='weights of pixels'):
        BandCrossEntropyLoss()(logits, label, torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match='avg_non_ignore'):
        BandCrossEntropyLoss([1.0, 2.0], avg_non_ignore=False)
    with pytest.raises(IndexError):
        BandCrossEntropyLoss()(logits, label.fill_(77))
