# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Dice in strips equals Dice of all resized logits."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmseg.models.losses import DiceLoss
from torch.nn import functional as F

from infsa_seg.models.losses import BandDiceLoss
from infsa_seg.models.losses.dice import dice_loss

from .band_losses import IGNORE, draw, equal, in_bands, resized

EPS = 1e-3
OPTIONS = [
    dict(zip(('naive_dice', 'per_class', 'per_image'), flags, strict=True))
    for flags in itertools.product([False, True], repeat=3)
]


def plain(logits, label, naive_dice, per_class, per_image):
    """By the definition, one group of pixels and classes after another."""
    valid = (label != IGNORE)[:, None]
    p = resized(logits, label).softmax(1) * valid
    t = F.one_hot(label.where(valid[:, 0], 0), p.shape[1])
    t = t.permute(0, 3, 1, 2) * valid
    groups = [(p, t)]
    for dim, apart in ((0, per_image), (1, per_class)):
        if apart:
            groups = [
                pair
                for p, t in groups
                for pair in zip(p.split(1, dim), t.split(1, dim), strict=True)
            ]
    losses = []
    for p, t in groups:
        if not t.any():
            continue
        if naive_dice:
            dice = (2 * (p * t).sum() + EPS) / (p.sum() + t.sum() + EPS)
        else:
            squares = (p**2).sum() + (t**2).sum()
            dice = 2 * (p * t).sum() / (squares + 2 * EPS)
        losses.append(1 - dice)
    return torch.stack(losses).mean()


@pytest.mark.parametrize('options', OPTIONS)
def test_equals_the_plain_loss(options):
    """1e-12, float64; a class that one image lacks, one that both lack."""
    logits, label = draw((4, 4), 3, classes=6)
    label[label == 4] = 1
    label[0][label[0] == 2] = 3
    loss = BandDiceLoss(**options, max_logits=2000)
    wanted = equal(
        loss(logits, label), plain(logits, label, **options), logits, 1e-12
    )
    assert wanted.abs().max() > 1e-4


@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    stride=st.sampled_from([1, 1.7, 2, 3.5]),
    classes=st.integers(2, 6),
    ignored=st.sampled_from([0, 0.3, 0.9]),
    max_logits=st.integers(2000, 9000),
    cuts=st.lists(st.integers(1, 20), max_size=3),
    options=st.sampled_from(OPTIONS),
)
def test_any_size_pieces_and_bands(
    height, width, stride, classes, ignored, max_logits, cuts, options
):
    logits, label = draw((height, width), stride, classes, ignored=ignored)
    label[:, 0, 0] = 1
    loss = BandDiceLoss(**options, max_logits=max_logits)
    value = in_bands(loss, logits, label, cuts)
    equal(value, plain(logits, label, **options), logits)


@pytest.mark.parametrize('naive_dice', [False, True])
def test_equals_mmsegmentation_without_ignored_pixels(naive_dice):
    """1e-7: it counts target pixels in float32, and adds eps to them."""
    logits, label = draw((5, 4), 3, ignored=0)
    options = dict(naive_dice=naive_dice, loss_weight=0.7)
    loss = BandDiceLoss(per_class=False, per_image=True, **options)
    wanted = DiceLoss(use_sigmoid=False, **options)
    wanted = wanted(resized(logits, label), label)
    equal(loss(logits, label), wanted, logits, 1e-7)


@pytest.mark.parametrize('eps', [EPS, 0])
@pytest.mark.parametrize('options', OPTIONS)
def test_only_ignored_pixels(options, eps):
    logits, label = draw((3, 4), 4)
    terms = BandDiceLoss(**options, eps=eps).terms(logits, label.fill_(IGNORE))
    terms.loss.backward()
    assert terms.loss == 0
    assert terms.accuracy == 0
    assert logits.grad.eq(0).all()


def test_nothing_over_nothing_has_no_slope():
    sums = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    loss = dice_loss(sums[0], sums[1], torch.zeros(3), eps=0, squared=True)
    (grad,) = torch.autograd.grad(loss, sums)
    assert grad.eq(0).all()


def test_right_and_wrong():
    """Sure of the right classes, of the wrong ones."""
    label = torch.randint(3, (2, 6, 6))
    for shift, wanted in ((0, 0.0), (1, 1.0)):
        sure = F.one_hot((label + shift) % 3).permute(0, 3, 1, 2) * 100.0
        terms = BandDiceLoss(eps=0).terms(sure.double(), label)
        assert terms.loss == pytest.approx(wanted, abs=1e-12)
        assert terms.accuracy == 100 * (1 - wanted)


def test_half_precision_is_summed_in_single():
    logits, label = draw((6, 6), 4, dtype=torch.float32)
    half = logits.detach().bfloat16().requires_grad_()
    value = BandDiceLoss()(half, label)
    assert value.dtype == torch.float32
    single = half.detach().float().requires_grad_()
    wanted = plain(single, label, False, True, False)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    value.backward(), wanted.backward()
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        half.grad.float(), single.grad, rtol=2**-7, atol=1e-7
    )


def test_errors():
    logits, label = draw((2, 2), 2)
    with pytest.raises(ValueError, match='use DiceLoss with use_sigmoid'):
        BandDiceLoss()(logits[:, :1], label)
    with pytest.raises(ValueError, match='weights of pixels'):
        BandDiceLoss()(logits, label, torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match='eps=-1'):
        BandDiceLoss(eps=-1)
    with pytest.raises(ValueError, match='label -1 is none of the 5'):
        BandDiceLoss()(logits, label.fill_(-1))
