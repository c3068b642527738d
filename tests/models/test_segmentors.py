# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The segmentor of ours, beside mmsegmentation's."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

from infsa_seg.models import BandCrossEntropyLoss
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import split_rows
from tests.execution.networks import forward, segmentor

KIND = 'BandEncoderDecoder'


def sample(height, width, **meta):
    result = SegDataSample()
    size = (height, width)
    result.set_metainfo(dict(img_shape=size, ori_shape=size, **meta))
    result.gt_sem_seg = PixelData(data=torch.randint(5, (1, *size)))
    return result


@pytest.mark.parametrize(('height', 'width'), [(1, 1), (43, 67), (64, 32)])
def test_stream_equals_whole(height, width):
    """Classes of the plain forward, whatever the bands."""
    pixels = torch.randn(2, 3, height, width)
    model = segmentor(kind=KIND)
    truth = torch.stack([forward(model, p[None]) for p in pixels]).argmax(1)
    for cfg in (
        dict(mode='whole'),
        dict(mode='stream'),
        dict(mode='stream', band_rows=1),
        dict(mode='slide', crop_size=(64, 72), stride=(32, 32)),
    ):
        model.test_cfg = ConfigDict(cfg)
        samples = [sample(height, width) for _ in pixels]
        found = model(pixels, samples, mode='predict')
        assert ('seg_logits' in found[0]) == (cfg['mode'] != 'stream')
        for one, other in zip(found, truth, strict=True):
            assert one.pred_sem_seg.data[0].equal(other)


def test_stream_keeps_no_logits_and_needs_no_samples():
    model = segmentor(kind=KIND, test_cfg=dict(mode='stream'))
    (found,) = model(torch.randn(1, 3, 20, 20), mode='predict')
    assert found.pred_sem_seg.data.shape == (1, 20, 20)


def test_stream_of_padded_and_flipped_images():
    """As the base class undoes both."""
    image = torch.randn(1, 3, 40, 48)
    for direction, dim in (('horizontal', 3), ('vertical', 2)):
        flipped = nn.functional.pad(image.flip(dim), (0, 8, 0, 16))
        meta = dict(
            padding_size=(0, 8, 0, 16), flip=True, flip_direction=direction
        )
        model = segmentor(kind=KIND, test_cfg=dict(mode='stream'))
        (found,) = model(flipped, [sample(40, 48, **meta)], mode='predict')
        truth = forward(model, image.flip(dim)).argmax(0).flip(dim - 2)
        assert found.pred_sem_seg.data[0].equal(truth)


def test_resized_images_cannot_be_streamed():
    model = segmentor(kind=KIND, test_cfg=dict(mode='stream'))
    resized = sample(40, 48)
    resized.set_metainfo(dict(ori_shape=(80, 96)))
    with pytest.raises(ValueError, match=r"leave Resize out .* mode='whole'"):
        model(torch.randn(1, 3, 40, 48), [resized], mode='predict')


def test_sides_that_are_no_multiple_of_the_patch():
    """The loss is that of the image padded by hand, its padding ignored."""
    model = segmentor(kind=KIND)
    pixels = torch.randn(1, 3, 43, 67)
    odd = sample(43, 67)
    even = sample(48, 72)
    label = nn.functional.pad(odd.gt_sem_seg.data, (0, 5, 0, 5), value=255)
    even.gt_sem_seg = PixelData(data=label)
    padded = nn.functional.pad(pixels, (0, 5, 0, 5))
    losses = [
        model(x, [s], mode='loss')['decode.loss_ce']
        for x, s in ((pixels, odd), (padded, even))
    ]
    assert losses[0].equal(losses[1])
    assert odd.gt_sem_seg.data.shape == (1, 43, 67)


def head(kind, **kwargs):
    return dict(
        type=kind,
        in_channels=24,
        in_index=1,
        channels=8,
        num_classes=5,
        norm_cfg=dict(type='BN'),
        **kwargs,
    )


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            dict(attention='softmax'),
            r'backbone\.layers\.0\.attn\.op \(SoftmaxAttention\) is neither '
            r'.* use attn_cfg',
        ),
        (
            dict(attention='pure'),
            r'attn\.op \(PureInfSA\)',
        ),
        (
            dict(head=head('FCNHead')),
            r'decode_head \(FCNHead\) .* use BandSegHead',
        ),
        (
            dict(
                neck=dict(
                    type='FPN',
                    in_channels=[24, 24],
                    out_channels=24,
                    num_outs=2,
                )
            ),
            r'neck \(FPN\) .* leave the neck out',
        ),
    ],
)
def test_parts_that_cannot_run_in_bands(changes, message):
    """They are named when the model is built for it."""
    segmentor(**changes)
    with pytest.raises(ValueError, match=message):
        segmentor(kind=KIND, test_cfg=dict(mode='stream'), **changes)


def test_normalisation_over_space_is_refused():
    model = segmentor()
    model.decode_head.decode[0][1] = nn.GroupNorm(2, 16)
    with pytest.raises(
        ValueError, match=r'decode_head\.decode\.0\.1 \(GroupNorm\)'
    ):
        SegmentorNetwork(model)
    model = segmentor()
    model.decode_head.align_corners = True
    with pytest.raises(ValueError, match='align_corners'):
        SegmentorNetwork(model)


class TestBands:
    """Training on one of the bands of an image."""

    PARALLEL = SimpleNamespace(rows=lambda rows: split_rows(rows, 2)[1])

    @staticmethod
    def build(**kwargs):
        model = segmentor(kind=KIND, **kwargs)
        model.decode_head.loss_decode = BandCrossEntropyLoss()
        return model

    def test_other_losses(self):
        with pytest.raises(ValueError, match='loss_decode: bands need losses'):
            segmentor(kind=KIND).share_images(self.PARALLEL)

    def test_padding_is_that_of_the_band(self):
        model = self.build()
        model.data_preprocessor.size = (60, 40)
        model.share_images(self.PARALLEL)
        # Four of eight rows of patches; the last patch is cut short.
        assert model.data_preprocessor.size == (28, 40)

    def test_crops_of_no_size(self):
        with pytest.raises(ValueError, match=r'data_preprocessor\.size=\(hei'):
            self.build().share_images(self.PARALLEL)

    def test_an_auxiliary_head(self):
        model = self.build(auxiliary_head=head('FCNHead', num_convs=1))
        model.data_preprocessor.size = (64, 64)
        with pytest.raises(ValueError, match='auxiliary_head: a head of whol'):
            model.share_images(self.PARALLEL)

    def test_parts_that_cannot_run_in_bands(self):
        model = segmentor(kind=KIND, attention='softmax')
        with pytest.raises(ValueError, match='SoftmaxAttention'):
            model.share_images(self.PARALLEL)
