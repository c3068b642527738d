# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmengine.structures import BaseDataElement
from mmseg.registry import MODELS

from infsa_seg.models import InfViTClassifier

BACKBONE = dict(
    type='InfViT',
    arch=dict(embed_dims=16, num_layers=2, num_heads=2),
    img_size=32,
    patch_size=8,
)


def classifier(pool='mean', ffn='mlp', num_classes=5, **kwargs):
    backbone = BACKBONE | dict(ffn=ffn) | kwargs.pop('backbone', {})
    return MODELS.build(
        dict(
            type='InfViTClassifier',
            backbone=backbone,
            num_classes=num_classes,
            pool=pool,
            **kwargs,
        )
    )


def samples(*labels, **metainfo):
    elements = [BaseDataElement(metainfo=metainfo) for _ in labels]
    for element, label in zip(elements, labels, strict=True):
        element.gt_label = label
    return elements


def plain_cross_entropy(logits, target, smoothing):
    """-sum_k t_k log p_k, with t the smoothed weights, mean over pictures."""
    target = (1 - smoothing) * target + smoothing / logits.shape[1]
    probability = logits.exp() / logits.exp().sum(1, keepdim=True)
    return -(target * probability.log()).sum(1).mean()


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_loss_of_soft_targets_is_the_plain_formula(smoothing):
    model = classifier(label_smoothing=smoothing).double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    data = samples(0, 1, 2)
    target = torch.rand(3, 5, dtype=torch.float64)
    target /= target.sum(1, keepdim=True)
    for sample, score in zip(data, target, strict=True):
        sample.gt_score = score
    loss = model(x, data, mode='loss')['loss']
    expected = plain_cross_entropy(model(x), target, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_loss_of_labels_is_that_of_their_one_hot_rows(smoothing):
    model = classifier(label_smoothing=smoothing).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    loss = model(x, samples(4, 1), mode='loss')['loss']
    target = torch.eye(5, dtype=torch.float64)[[4, 1]]
    expected = plain_cross_entropy(model(x), target, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize('pool', ['mean', 'cls_token'])
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('variant', ['neumann', 'linear', 'softmax', 'pure'])
def test_every_parameter_learns(pool, ffn, variant):
    # Nothing else than the class token's own row reaches its last FFN.
    model = classifier(
        pool, ffn, backbone=dict(attn_cfg=dict(variant=variant))
    )
    model.init_weights()
    x = torch.randn(4, 3, 32, 32)
    model.train()(x, samples(0, 1, 2, 3), mode='loss')['loss'].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.head.weight.grad.abs().sum() > 0
    if pool == 'cls_token':
        assert model.cls_token.grad.abs().sum() > 0


def test_mean_pooling_in_plain_words():
    model = classifier().eval()
    x = torch.randn(2, 3, 32, 32)
    tokens = model.backbone(x)[-1].flatten(2).transpose(1, 2)
    expected = model.head(model.norm(tokens).mean(1))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize('with_cp', [False, True])
def test_class_token_in_plain_words(with_cp):
    """One more token in every layer, without a position."""
    model = classifier('cls_token', backbone=dict(with_cp=with_cp))
    x = torch.randn(2, 3, 32, 32)
    backbone = model.backbone
    tokens = backbone.embed(x).reshape(2, 16, 16)
    token = model.cls_token.expand(2, 1, 16)
    # As a picture of one row, the layers know no class token.
    row = torch.cat([token, tokens], 1)[:, None]
    for layer in backbone.layers:
        row = layer(row)
    expected = model.head(model.norm(row[:, 0, 0]))
    torch.testing.assert_close(model(x), expected)


def test_class_token_stands_outside_the_grid():
    """The convolution between tokens never sees it."""
    model = classifier(
        'cls_token',
        'dwconv',
        backbone=dict(
            attn_cfg=dict(variant='none'),
            arch=dict(embed_dims=16, num_layers=1, num_heads=2),
        ),
    )
    a, b = torch.randn(2, 1, 3, 32, 32)
    # Without attention it has nothing but itself.
    torch.testing.assert_close(model(a), model(b))


@pytest.mark.parametrize('pool', ['mean', 'cls_token'])
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_padding_is_not_seen(pool, ffn):
    model = classifier(pool, ffn).eval()
    x = torch.randn(2, 3, 32, 40)
    data = samples(0, 1, img_shape=(20, 32))
    data[1].set_metainfo(dict(img_shape=(32, 40)))
    logits = model(x, data)
    other = x.clone()
    # Rows from 24 on and columns from 32 on are of no token of the first.
    other[0, :, 24:] = 7
    other[0, :, :, 32:] = -7
    torch.testing.assert_close(model(other, data), logits)
    other[0, :, 23] = 100
    assert not torch.allclose(model(other, data)[0], logits[0])
    assert not torch.allclose(model(x)[0], logits[0])


def test_predict():
    model = classifier().eval()
    x = torch.randn(3, 3, 32, 32)
    out = model(x, samples(0, 1, 2), mode='predict')
    scores = torch.stack([sample.pred_score for sample in out])
    torch.testing.assert_close(scores, model(x).softmax(1))
    assert [int(s.pred_label) for s in out] == scores.argmax(1).tolist()
    assert [s.gt_label for s in out] == [0, 1, 2]
    assert len(model(x, mode='predict')) == 3


def test_half_precision_has_losses_in_full():
    model = classifier()
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast('cpu', torch.bfloat16):
        loss = model(x, samples(0, 1), mode='loss')['loss']
        assert model(x).dtype == torch.float32
    assert loss.dtype == torch.float32
    loss.backward()
    assert model.head.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(pool='max'), "pool='max' is unknown"),
        (dict(backbone=dict(out_indices=0)), 'leave out the last layer'),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        classifier(**settings)


def test_a_label_that_is_no_class_is_named():
    model = classifier()
    data = samples(5, img_path='a/b.JPEG')
    with pytest.raises(ValueError, match=r'a/b\.JPEG: has the label 5.*5 cl'):
        model(torch.randn(1, 3, 32, 32), data, mode='loss')
    with pytest.raises(ValueError, match='mode'):
        model(torch.randn(1, 3, 32, 32), mode='none')


class TestDataPreprocessor:
    def build(self, **kwargs):
        return MODELS.build(dict(type='ClsDataPreprocessor', **kwargs))

    def test_normalises_in_the_order_of_the_network(self):
        preprocess = self.build(mean=[1, 2, 3], std=[2, 4, 8], bgr_to_rgb=True)
        blue_first = torch.tensor([30, 20, 10], dtype=torch.uint8)
        picture = blue_first.view(3, 1, 1).expand(3, 2, 2)
        out = preprocess(dict(inputs=[picture], data_samples=samples(0)))
        expected = torch.tensor([9 / 2, 18 / 4, 27 / 8])
        torch.testing.assert_close(out['inputs'][0, :, 1, 1], expected)
        assert out['inputs'].dtype == torch.float32
        # In half precision the numbers of the network are rounded, not these.
        assert not list(preprocess.buffers())

    def test_pads_at_the_right_and_the_bottom(self):
        pictures = [torch.ones(3, 4, 6), torch.ones(3, 5, 2)]
        out = self.build(mean=[3] * 3, std=[1] * 3)(dict(inputs=pictures))
        assert out['inputs'].shape == (2, 3, 5, 6)
        assert out['inputs'][0, :, 4:].eq(0).all()
        assert out['inputs'][1, :, :, 2:].eq(0).all()
        assert out['inputs'].eq(-2).sum() == 3 * (24 + 10)

    def test_augments_in_training_only(self):
        preprocess = self.build(
            num_classes=3,
            batch_augments=[
                dict(type='MixUpCutMix', mixup_alpha=1.0, cutmix_alpha=0.0)
            ],
        )
        data = dict(
            inputs=list(torch.randn(4, 3, 8, 8)),
            data_samples=samples(0, 1, 2, 0),
        )
        out = preprocess(data, training=False)
        torch.testing.assert_close(out['inputs'], torch.stack(data['inputs']))
        assert 'gt_score' not in out['data_samples'][0]
        out = preprocess(data, training=True)
        scores = torch.stack([s.gt_score for s in out['data_samples']])
        torch.testing.assert_close(scores.sum(1), torch.ones(4))
        assert 'gt_score' not in data['data_samples'][0]

    def test_needs_the_number_of_classes(self):
        with pytest.raises(ValueError, match='set num_classes'):
            self.build(batch_augments=[dict(type='MixUpCutMix')])


def test_exports():
    assert MODELS.get('InfViTClassifier') is InfViTClassifier
