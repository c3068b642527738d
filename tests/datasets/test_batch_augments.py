# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import builtins

import numpy as np
import pytest
import torch
from mmseg.registry import TRANSFORMS

from infsa_seg.datasets import (
    BatchRandomErasing,
    MixUpCutMix,
    RandAugment,
    RandomResizedCrop,
)


def constant_pictures(batch=16, size=(12, 20)):
    """Picture b is b everywhere, and shows itself whatever is mixed."""
    numbers = torch.arange(batch, dtype=torch.float64).view(-1, 1, 1, 1)
    return numbers.expand(batch, 3, *size).clone(), torch.eye(batch).double()


def test_cutmix_weighs_labels_by_the_pasted_area():
    inputs, scores = constant_pictures()
    mix = MixUpCutMix(mixup_alpha=0.0)
    partners = set()
    for _ in range(5):
        mixed, weights = mix(inputs, scores)
        for own, (picture, weight) in enumerate(
            zip(mixed, weights, strict=True)
        ):
            # Every pixel is one picture's, and says whose.
            area = torch.bincount(picture[0].flatten().long(), minlength=16)
            torch.testing.assert_close(
                weight, area / picture[0].numel(), check_dtype=False
            )
            partners.add(int(torch.count_nonzero(weight)))
            mask = picture[0] != own
            rows, columns = mask.any(1).sum(), mask.any(0).sum()
            assert mask.sum() == rows * columns  # a rectangle
    assert partners == {1, 2}


def test_mixup_weighs_labels_as_pixels():
    inputs, scores = constant_pictures()
    mixed, weights = MixUpCutMix(cutmix_alpha=0.0)(inputs, scores)
    expected = weights @ torch.arange(16.0).double()
    torch.testing.assert_close(mixed[:, 0, 3, 5], expected)
    torch.testing.assert_close(weights.sum(1), torch.ones(16).double())
    assert torch.count_nonzero(weights, 1).max() == 2
    # Each has a weight of its own.
    assert len(weights.max(1).values.unique()) > 8


def test_mixup_draws_from_beta():
    """Of Beta(0.2, 0.2) half lies beyond 0.05 and 0.95; of evenly, 0.1."""
    inputs, scores = constant_pictures(4096, (1, 1))
    _, weights = MixUpCutMix(0.2, 0.0)(inputs, scores)
    own = weights.diagonal()
    outer = ((own < 0.05) | (own > 0.95)).double().mean()
    beta = torch.distributions.Beta(0.2, 0.2).sample((100_000,))
    expected = ((beta < 0.05) | (beta > 0.95)).double().mean()
    assert abs(outer - expected) < 0.03


def test_mixing_keeps_what_the_labels_sum_to():
    """Already mixed labels can be mixed again."""
    inputs, scores = torch.randn(8, 3, 16, 16), torch.rand(8, 5)
    scores /= scores.sum(1, keepdim=True)
    mix = MixUpCutMix()
    for _ in range(8):
        _, scores = mix(inputs, scores)
        torch.testing.assert_close(scores.sum(1), torch.ones(8))


def test_share_of_batches():
    inputs, scores = constant_pictures(2, (2, 2))
    kinds = {'none': 0, 'mixup': 0, 'cutmix': 0}
    mix = MixUpCutMix(1.0, 1.0, prob=0.5, switch_prob=0.25)
    mix._mix = lambda x: (
        kinds.update(mixup=kinds['mixup'] + 1)
        or ((x, torch.tensor([0, 1]), torch.ones(2)))
    )
    mix._cut = lambda x: (
        kinds.update(cutmix=kinds['cutmix'] + 1)
        or ((x, torch.tensor([0, 1]), torch.ones(2)))
    )
    for _ in range(2000):
        mix(inputs, scores)
    assert abs(kinds['mixup'] - 750) < 100
    assert abs(kinds['cutmix'] - 250) < 60
    assert MixUpCutMix(0.0, 1.0).switch_prob == 1
    with pytest.raises(ValueError, match='both 0'):
        MixUpCutMix(0.0, 0.0)


def test_erasing_leaves_a_rectangle_at_the_mean():
    erase = BatchRandomErasing(prob=0.5, area_range=(0.1, 0.3))
    inputs, scores = torch.ones(200, 3, 20, 20), torch.rand(200, 4)
    out, same = erase(inputs, scores)
    assert same is scores
    erased = out[:, 0] == 0
    assert out.unique().tolist() == [0, 1]
    share = erased.flatten(1).double().mean(1)
    hit = share > 0
    assert 70 < hit.sum() < 130
    assert share[hit].min() > 0.05 and share[hit].max() < 0.35
    for mask in erased[hit]:
        assert mask.sum() == mask.any(1).sum() * mask.any(0).sum()


def test_randaugment_changes_pictures_each_by_itself():
    augment = TRANSFORMS.build(
        dict(type='RandAugment', num_ops=2, magnitude=9)
    )
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (16, 24, 3)).astype(np.uint8)
    outs = [augment(dict(img=picture.copy()))['img'] for _ in range(12)]
    assert {(o.shape, o.dtype) for o in outs} == {
        ((16, 24, 3), np.dtype(np.uint8))
    }
    assert len({o.tobytes() for o in outs}) > 6


def test_randaugment_gives_kornia_red_first():
    augment = RandAugment()
    seen = []
    augment._augment = lambda x: seen.append(x) or x
    picture = np.zeros((2, 2, 3), np.uint8)
    picture[..., 2] = 255  # red, as mmcv has it
    out = augment(dict(img=picture))['img']
    assert seen[0][0, :, 0, 0].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(out, picture)


def test_without_kornia(monkeypatch):
    plain = builtins.__import__

    def refuse(name, *args):
        if name.partition('.')[0] == 'kornia':
            raise ImportError(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, '__import__', refuse)
    for build in (RandAugment, BatchRandomErasing, MixUpCutMix):
        with pytest.raises(ImportError, match=r'infsa_seg\[pretrain\]'):
            build()
    # Only what it does is asked for.
    MixUpCutMix(cutmix_alpha=0.0)


class TestRandomResizedCrop:
    def test_areas_and_aspects(self):
        crop = RandomResizedCrop(8, crop_ratio_range=(0.2, 0.6))
        boxes = np.array([crop.draw(300, 500) for _ in range(500)])
        top, left, height, width = boxes.T
        assert (top >= 0).all() and (top + height <= 300).all()
        assert (left >= 0).all() and (left + width <= 500).all()
        area, aspect = height * width / 150_000, width / height
        assert 0.195 < area.min() < 0.23 and 0.57 < area.max() < 0.605
        assert 0.74 < aspect.min() < 0.78 and 1.28 < aspect.max() < 1.35
        # Even in the logarithm: as many tall as wide.
        assert abs((aspect > 1).mean() - 0.5) < 0.07
        assert len(np.unique(top)) > 50

    def test_of_a_thin_picture_the_middle(self):
        crop = RandomResizedCrop(8, crop_ratio_range=(1.0, 1.0))
        assert crop.draw(10, 1000) == (0, 493, 10, 13)
        assert crop.draw(1000, 30) == (480, 0, 40, 30)

    def test_resizes_the_part(self):
        rows = np.repeat(np.arange(0, 200, 2, dtype=np.uint8)[:, None], 80, 1)
        picture = np.stack([rows] * 3, -1)
        crop = RandomResizedCrop((16, 12))
        crop.draw = lambda height, width: (40, 10, 24, 32)
        out = crop(dict(img=picture))
        assert out['img'].shape == (12, 16, 3)
        assert out['img_shape'] == (12, 16)
        # Row i of the result is the mean of rows 40 + 2i and 41 + 2i.
        inner = out['img'][2:-2, 5, 0].astype(float)
        np.testing.assert_allclose(inner, 81 + 4 * np.arange(2, 10), atol=1)
