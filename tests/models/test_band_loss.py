# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Cross-entropy in strips equals resizing all logits and PyTorch's loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.nn import functional as F

from infsa_seg.models.losses import BandCrossEntropyLoss, BandDiceLoss, ohem

from .band_losses import IGNORE, PeakElements, draw, equal, in_bands, resized


def plain(logits, label, class_weight=None, reduction='mean'):
    return F.cross_entropy(
        resized(logits, label),
        label,
        None if class_weight is None else logits.new_tensor(class_weight),
        ignore_index=IGNORE,
        reduction=reduction,
    )


@pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float32, 1e-6), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize('class_weight', [None, [1.0, 0.2, 3.0, 0.0, 0.5]])
@pytest.mark.parametrize('max_logits', [600, 2000, 2**23])
def test_equals_the_plain_loss(dtype, tolerance, class_weight, max_logits):
    """Value and gradient; pieces of few columns, of some rows, of all."""
    logits, label = draw((3, 4), 4, dtype=dtype)
    loss = BandCrossEntropyLoss(class_weight, max_logits=max_logits)
    wanted = plain(logits, label, class_weight)
    grad = equal(loss(logits, label), wanted, logits, tolerance)
    assert grad.abs().max() > 1e-3


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    stride=st.sampled_from([1, 1.7, 2, 3.5, 4]),
    classes=st.integers(2, 6),
    max_logits=st.integers(1000, 20_000),
    cuts=st.lists(st.integers(1, 36), max_size=3),
)
def test_any_size_pieces_and_bands(
    height, width, stride, classes, max_logits, cuts
):
    """Also where labels are no multiple of the logits."""
    logits, label = draw((height, width), stride, classes, batch=1)
    label[:, 0, 0] = 1
    loss = BandCrossEntropyLoss(max_logits=max_logits)
    value = in_bands(loss, logits, label, cuts)
    equal(value, plain(logits, label), logits, 1e-12)


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


def test_without_a_gradient():
    logits, label = draw((3, 4), 4)
    for loss in (BandCrossEntropyLoss(), BandDiceLoss()):
        value = loss(logits.detach(), label)
        assert value == loss(logits, label).detach()
        assert not value.requires_grad


def test_mean_over_all_pixels_as_mmsegmentation():
    logits, label = draw((3, 4), 4)
    value = BandCrossEntropyLoss(avg_non_ignore=False)(logits, label)
    wanted = plain(logits, label, reduction='sum') / label.numel()
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(('classes', 'stride'), [(2, 2), (8, 8)])
@pytest.mark.parametrize(
    'loss',
    [
        BandCrossEntropyLoss(max_logits=30_000),
        BandCrossEntropyLoss(max_logits=90_000),
        BandCrossEntropyLoss(ohem=dict(min_kept=999), max_logits=30_000),
        BandDiceLoss(max_logits=30_000),
        BandDiceLoss(naive_dice=True, max_logits=30_000),
    ],
    ids=['few', 'many', 'ohem', 'dice', 'naive-dice'],
)
def test_no_more_logits_than_allowed(loss, classes, stride, monkeypatch):
    """Beside the gradient of the coarse logits, as large as those."""
    # Counts of bits are no logits: so few of them that they do not show.
    monkeypatch.setattr(ohem, '_DIGIT', 8)
    size = (24 // stride, 576 // classes // stride)
    logits, label = draw(size, stride, classes, dtype=torch.float32)
    with PeakElements() as counter:
        loss(logits, label).backward()
    # The gradient is handed on: its copy times the slope of the loss.
    beside = 2 * logits.numel()
    assert counter.peak <= loss.max_logits + beside
    assert counter.peak >= loss.max_logits / 2
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


def samples_of(label):
    samples = []
    for image in label:
        samples.append(SegDataSample())
        samples[-1].gt_sem_seg = PixelData(data=image[None])
    return samples


def test_a_config_can_name_it():
    one = head(loss_decode=dict(type='BandCrossEntropyLoss', max_logits=9999))
    other = head(
        loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True)
    )
    taps = (torch.randn(2, 6, 3, 5),)
    samples = samples_of(draw((3, 5), 16, classes=4)[1])
    one.eval(), other.eval()
    losses, wanted = (h.loss(taps, samples, {}) for h in (one, other))
    assert losses.keys() == wanted.keys() == {'loss_ce', 'acc_seg'}
    for name in losses:
        torch.testing.assert_close(losses[name], wanted[name])


def test_a_list_of_losses():
    """Under their names, those of one name added; one accuracy."""
    configs = [
        dict(type='BandCrossEntropyLoss', ohem=dict(thresh=0.2, min_kept=5)),
        dict(type='BandDiceLoss', loss_weight=3.0),
        dict(type='BandDiceLoss', naive_dice=True),
        dict(type='BandDiceLoss', per_class=False, loss_name='loss_micro'),
    ]
    several = head(loss_decode=configs).eval()
    taps = (torch.randn(2, 6, 3, 5),)
    label = draw((3, 5), 16, classes=4)[1]
    losses = several.loss(taps, samples_of(label), {})
    assert list(losses) == ['loss_ce', 'acc_seg', 'loss_dice', 'loss_micro']
    ce, dice, naive, micro = (head(loss_decode=c).eval() for c in configs)
    single = [h.loss(taps, samples_of(label), {}) for h in (ce, dice, naive)]
    assert losses['loss_ce'] == single[0]['loss_ce'] > 0
    total = single[1]['loss_dice'] + single[2]['loss_dice']
    assert losses['loss_dice'] == total
    assert single[1]['loss_dice'] > 1.5
    wanted = micro.loss(taps, samples_of(label), {})['loss_micro']
    assert losses['loss_micro'] == wanted
    for other in single:
        assert losses['acc_seg'].equal(other['acc_seg'])


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(sampler=dict(type='OHEMPixelSampler')), r'sampler.*ohem='),
        (dict(align_corners=True), 'align_corners'),
        (
            dict(
                loss_decode=[
                    dict(type='BandCrossEntropyLoss'),
                    dict(type='DiceLoss'),
                ]
            ),
            'BandCrossEntropyLoss in a list',
        ),
        (
            dict(
                loss_decode=[
                    dict(type='CrossEntropyLoss'),
                    dict(type='BandDiceLoss'),
                ]
            ),
            'BandDiceLoss in a list',
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
    with pytest.raises(ValueError, match='label 77 is none of the 5'):
        BandCrossEntropyLoss()(logits, label.fill_(77))
