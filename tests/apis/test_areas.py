# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from infsa_seg.apis.areas import count_areas, mean_iou


def test_counted_by_hand():
    classes = torch.tensor([[0, 0, 1, 1], [2, 255, 0, -1]], dtype=torch.int16)
    labels = torch.tensor([[0, 1, 1, 255], [2, 0, -1, 0]])
    areas = count_areas(classes, labels, 4)
    hits, union, found, truth = (part.tolist() for part in areas)
    assert hits == [1, 1, 1, 0]
    assert union == [2, 2, 1, 0]
    assert found == [2, 1, 1, 0]
    assert truth == [1, 2, 1, 0]
    # The last class does not occur.
    assert mean_iou(areas) == pytest.approx((200 / 3, 75))


def test_parts_add_up_exactly(monkeypatch):
    """And as far as float64 goes, which is beyond any image."""
    classes, labels = torch.randint(5, (2, 50, 41))
    whole = count_areas(classes, labels, 5)
    monkeypatch.setattr('infsa_seg.apis.areas._PART', 7)
    for one, other in zip(whole, count_areas(classes, labels, 5), strict=True):
        assert one.dtype == torch.float64 and one.equal(other)
    assert sum(area.sum() for area in whole[2:]) == 2 * 50 * 41


def test_any_number_of_classes():
    """255 is a class where there are so many."""
    classes = torch.tensor([255, 255, 299, 65535])
    hits, *_ = count_areas(classes, classes.clone(), 300)
    assert hits[255] == 2 and hits[299] == 1 and hits.sum() == 3
