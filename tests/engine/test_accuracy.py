# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement
from mmseg.registry import METRICS

from infsa_seg.engine import TopKAccuracy
from infsa_seg.engine.accuracy import place


def sample(scores, label, **metainfo):
    element = BaseDataElement(metainfo=metainfo)
    element.pred_score = torch.as_tensor(scores)
    element.gt_label = label
    return element


def test_equals_counting_by_hand():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(60, 10))
    labels = rng.integers(0, 10, 60)
    metric = METRICS.build(dict(type='TopKAccuracy', topk=(1, 3, 5)))
    evaluator = Evaluator(metric)
    for start in range(0, 60, 16):
        chosen = slice(start, start + 16)
        evaluator.process(
            [
                sample(s, int(label))
                for s, label in zip(
                    scores[chosen], labels[chosen], strict=True
                )
            ]
        )
    order = np.argsort(-scores, 1)
    expected = {
        f'accuracy/top{k}': 100
        * (order[:, :k] == labels[:, None]).any(1).mean()
        for k in (1, 3, 5)
    }
    assert evaluator.evaluate(60) == pytest.approx(expected)


def one_of_two(rank, folder, scores, labels):
    torch.distributed.init_process_group(
        'gloo', f'file://{folder}/store', rank=rank, world_size=2
    )
    evaluator = Evaluator(TopKAccuracy((1, 2)))
    indices = list(DefaultSampler(labels, shuffle=False))
    for start in range(0, len(indices), 2):
        evaluator.process(
            [sample(scores[i], labels[i]) for i in indices[start : start + 2]]
        )
    metrics = evaluator.evaluate(len(labels))
    torch.save(metrics, f'{folder}/{rank}.pt')
    torch.distributed.destroy_process_group()


def test_two_ranks_count_what_one_does(tmp_path, monkeypatch):
    """Of five pictures they see six, in batches of two."""
    monkeypatch.chdir(tmp_path)  # where mmengine collects
    scores = torch.rand(5, 4)
    labels = scores.argmax(1).tolist()
    # Where the first picture, seen twice, was wrong and the rest right.
    labels[0] = int(scores[0].argmin())
    # Forked: nothing has to be imported again.
    torch.multiprocessing.start_processes(
        one_of_two, (tmp_path, scores, labels), 2, start_method='fork'
    )
    for rank in range(2):
        assert torch.load(tmp_path / f'{rank}.pt') == pytest.approx(
            {'accuracy/top1': 80, 'accuracy/top2': 80}
        )


def test_samples_that_pad_the_last_batch_do_not_count():
    """Two ranks with two pictures each, of three: the fourth is a repeat."""
    metric = TopKAccuracy((1,))
    right, wrong = [0.1, 0.9], [0.9, 0.1]
    metric.process(
        None, [sample(s, 1).to_dict() for s in (right, wrong, right, right)]
    )
    assert metric.evaluate(3)['accuracy/top1'] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ('scores', 'label', 'expected'),
    [
        ([0.1, 0.7, 0.2], 1, 0),
        ([0.1, 0.7, 0.2], 0, 2),
        # Of equal scores the first goes before, as argmax has it.
        ([0.5, 0.5, 0.5], 0, 0),
        ([0.5, 0.5, 0.5], 2, 2),
        # A network that has broken down is never right.
        ([float('nan')] * 3, 1, 3),
        ([0.2, float('nan'), 0.1], 0, 1),
    ],
)
def test_place(scores, label, expected):
    assert place(torch.tensor(scores), label) == expected


def test_label_that_the_model_does_not_have():
    metric = TopKAccuracy()
    with pytest.raises(ValueError, match=r'a\.JPEG: has the label 2.*2 class'):
        metric.process(
            None, [sample([0.5, 0.5], 2, img_path='a.JPEG').to_dict()]
        )
