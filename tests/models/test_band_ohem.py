# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Hard example mining in strips equals sorting all pixels."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmseg.models.losses import CrossEntropyLoss
from mmseg.structures import OHEMPixelSampler
from torch.nn import functional as F

from infsa_seg.models.losses import BandCrossEntropyLoss

from .band_losses import IGNORE, draw, equal, in_bands, resized

WEIGHTS = [1.0, 0.2, 3.0, 0.0, 0.5, 2.0]


def plain(logits, label, thresh, min_kept, class_weight=None):
    """Sort, keep, mean over the weight that is kept."""
    fine = resized(logits, label)
    weight = None
    if class_weight is not None:
        weight = fine.new_tensor(class_weight[: fine.shape[1]])
    losses = F.cross_entropy(
        fine, label, weight, ignore_index=IGNORE, reduction='none'
    )
    valid = label != IGNORE
    safe = label.where(valid, 0)
    right = fine.softmax(1).gather(1, safe[:, None])[:, 0].detach()
    ease = -losses.detach() if thresh is None else right
    order = ease[valid].sort().values
    last = order[min(min_kept * len(label), len(order)) - 1]
    # Sorted by what differs in the last bits from the logarithm.
    kept = valid & (ease <= last + 1e-13)
    if thresh is not None:
        kept |= valid & (right < thresh)
    weight = torch.ones_like(losses) if weight is None else weight[safe]
    return losses[kept].sum() / weight[kept].sum()


@given(
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    stride=st.sampled_from([1, 1.7, 3]),
    classes=st.integers(2, 6),
    ignored=st.sampled_from([0, 0.3, 0.9]),
    max_logits=st.integers(2000, 9000),
    cuts=st.lists(st.integers(1, 18), max_size=2),
    thresh=st.sampled_from([None, 1e-3, 0.1, 0.7, 1.0]),
    min_kept=st.integers(1, 120),
    weighted=st.booleans(),
)
def test_any_size_pieces_and_bands(
    height,
    width,
    stride,
    classes,
    ignored,
    max_logits,
    cuts,
    thresh,
    min_kept,
    weighted,
):
    logits, label = draw((height, width), stride, classes, ignored=ignored)
    label[:, 0, 0] = 0  # of a weight that is not zero
    class_weight = WEIGHTS[:classes] if weighted else None
    loss = BandCrossEntropyLoss(
        class_weight,
        ohem=dict(thresh=thresh, min_kept=min_kept),
        max_logits=max_logits,
    )
    value = in_bands(loss, logits, label, cuts)
    wanted = plain(logits, label, thresh, min_kept, class_weight)
    equal(value, wanted, logits)


def sampled(logits, label, thresh, min_kept, class_weight=None):
    """Losses, weights and choice of all pixels, by mmsegmentation."""
    theirs = CrossEntropyLoss(class_weight=class_weight)
    sampler = OHEMPixelSampler(
        SimpleNamespace(ignore_index=IGNORE, loss_decode=theirs),
        thresh,
        min_kept,
    )
    fine = resized(logits, label)
    losses = theirs(
        fine, label, ignore_index=IGNORE, reduction_override='none'
    )
    weight = fine.new_tensor(class_weight or [1.0] * fine.shape[1])
    return losses, weight[label % 5], sampler.sample(fine, label[:, None])


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('class_weight', [None, WEIGHTS[:5]])
@pytest.mark.parametrize('thresh', [None, 0.02, 0.7])
def test_keeps_the_pixels_of_mmsegmentation(thresh, class_weight, dtype):
    """The mean over what it keeps; no two pixels are equally hard."""
    logits, label = draw((5, 6), 3, dtype=dtype)
    loss = BandCrossEntropyLoss(
        class_weight, ohem=dict(thresh=thresh, min_kept=80)
    )
    losses, weight, choice = sampled(logits, label, thresh, 80, class_weight)
    # By rank with the lower threshold and with none.
    assert choice.sum() > 160 if thresh == 0.7 else choice.sum() == 160
    wanted = (losses * choice).sum() / (weight * choice).sum()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    equal(loss(logits, label), wanted, logits, tolerance)


@pytest.mark.parametrize('thresh', [None, 0.1])
def test_mean_over_all_pixels_as_mmsegmentation(thresh):
    """1e-9: it adds an epsilon to the number of pixels."""
    logits, label = draw((5, 6), 3)
    loss = BandCrossEntropyLoss(
        avg_non_ignore=False, ohem=dict(thresh=thresh, min_kept=9)
    )
    choice = sampled(logits, label, thresh, 9)[-1]
    wanted = CrossEntropyLoss()(
        resized(logits, label), label, choice, ignore_index=IGNORE
    )
    equal(loss(logits, label), wanted, logits, 1e-9)


def sure(shape, hard, hardness):
    """Two classes, of which the first is right and sure, ``hard`` is not."""
    logits = torch.zeros(1, 2, *shape, dtype=torch.float64)
    logits[:, 0] = 4
    for place in hard:
        logits[0, 0, place] = -hardness
    return logits.requires_grad_(), torch.zeros(1, *shape, dtype=torch.long)


@pytest.mark.parametrize('thresh', [None, 0.1])
@pytest.mark.parametrize('min_kept', [1, 2, 3])
def test_equally_hard_pixels(thresh, min_kept):
    """All of them are kept, whatever the pieces; nothing else is."""
    rows = [0, 2, 4]
    logits, label = sure((5, 1), rows, 1.5)
    for max_logits in (12, 36, 999):
        loss = BandCrossEntropyLoss(
            ohem=dict(thresh=thresh, min_kept=min_kept),
            max_logits=max_logits,
        )
        value = loss(logits, label)
        wanted = torch.tensor(1.5, dtype=torch.float64).exp().log1p()
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
        (grad,) = torch.autograd.grad(value, logits)
        assert grad[0, 0, :, 0].nonzero()[:, 0].tolist() == rows


def test_extreme_logits():
    """Probabilities that are 0 and 1 in their precision."""
    logits, label = sure((6, 1), [1, 3], 500.0)
    with torch.no_grad():
        logits[0, 0, 0] = 900
        logits[0, 0, 3] = -900
    for min_kept, rows in ((1, [3]), (2, [1, 3]), (99, [1, 2, 3, 4, 5])):
        loss = BandCrossEntropyLoss(ohem=dict(min_kept=min_kept))
        (grad,) = torch.autograd.grad(loss(logits, label), logits)
        assert grad[0, 0, :, 0].nonzero()[:, 0].tolist() == rows


@pytest.mark.parametrize(
    ('options', 'walks'),
    [
        (dict(min_kept=9), 2),
        (dict(min_kept=9, thresh=1e-9), 2),
        # Enough are below the threshold; there are not so many.
        (dict(min_kept=9, thresh=0.9), 1),
        (dict(min_kept=9999), 1),
    ],
)
def test_walks_no_more_than_it_has_to(options, walks):
    logits, label = draw((3, 4), 3, dtype=torch.float32)
    merged = []

    def merge(state):
        merged.append(type(state).__name__)
        return state

    BandCrossEntropyLoss(ohem=options).terms(logits, label, merge=merge)
    assert merged == ['Histogram'] * walks + ['EntropyCounts']


@pytest.mark.parametrize('thresh', [None, 0.5])
@pytest.mark.parametrize('avg_non_ignore', [True, False])
def test_only_ignored_pixels(thresh, avg_non_ignore):
    logits, label = draw((3, 4), 4)
    terms = BandCrossEntropyLoss(
        avg_non_ignore=avg_non_ignore, ohem=dict(thresh=thresh)
    ).terms(logits, label.fill_(IGNORE))
    terms.loss.backward()
    assert terms.loss == 0
    assert terms.accuracy == 0
    assert logits.grad.eq(0).all()


@pytest.mark.parametrize('thresh', [None, 0.9])
def test_what_is_not_a_number_shows(thresh):
    logits, label = draw((3, 4), 2, ignored=0)
    with torch.no_grad():
        logits[0, 0, 0, 0] = torch.nan
    loss = BandCrossEntropyLoss(ohem=dict(thresh=thresh, min_kept=1))
    assert loss(logits, label).isnan()


def test_errors():
    for thresh in (0, 1.2):
        with pytest.raises(ValueError, match=f'thresh={thresh}'):
            BandCrossEntropyLoss(ohem=dict(thresh=thresh))
    with pytest.raises(ValueError, match='min_kept=0'):
        BandCrossEntropyLoss(ohem=dict(min_kept=0))
