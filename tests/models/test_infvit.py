# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from mmengine import ConfigDict
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.nn import functional as F

import infsa_seg  # noqa: F401 (registers)
from infsa_seg.layers import GlobalBranch, GlobalOp, LocalOp, run_global
from infsa_seg.layers.protocol import count_context, identity
from infsa_seg.models import BandSegHead, InfViT
from infsa_seg.ops import bands_of

SMALL = dict(
    arch=dict(embed_dims=24, num_layers=3, num_heads=3),
    img_size=32,
    patch_size=8,
)
VARIANTS = ['pure', 'linear', 'neumann', 'softmax', 'none']


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


def build(**kwargs):
    torch.manual_seed(0)
    return MODELS.build(dict(type='InfViT', **{**SMALL, **kwargs}))


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_any_input_size(variant, ffn):
    model = build(attn_cfg=dict(variant=variant), ffn=ffn, out_indices=(0, -1))
    for height, width in ((32, 32), (8, 8), (15, 41), (1, 1)):
        taps = model(torch.randn(2, 3, height, width))
        assert [t.shape for t in taps] == [
            (2, 24, -(-height // 8), -(-width // 8))
        ] * 2


@pytest.mark.parametrize(
    ('arch', 'millions'),
    [('tiny', 5.6), ('small', 21.9), ('base', 86.3), ('l4', 51.6)],
)
def test_arch_sizes(arch, millions):
    """Parameters of the backbone, as of ViT's of the same width and depth."""
    with torch.device('meta'):
        model = MODELS.build(
            dict(type='InfViT', arch=arch, attn_cfg=dict(variant='softmax'))
        )
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize('variant', ['linear', 'neumann'])
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
@pytest.mark.parametrize('height', [1, 2, 5])
def test_steps_by_band_equal_forward(variant, ffn, height):
    """The network run band by band through its protocol; 1e-10, float64.

    This is what an executor does: it knows the steps and the two kinds of
    operation, and no model.
    """
    model = build(attn_cfg=dict(variant=variant), ffn=ffn).double().eval()
    image = torch.randn(1, 3, 75, 43).double()
    (whole,) = model(image)
    rows = bands_of(whole.shape[2], height)
    bands = [
        model.embed(
            image[:, :, r.start * 8 : r.stop * 8],
            (r.start, 0),
            tuple(whole.shape[2:]),
        )
        for r in rows
    ]
    context = count_context(bands, identity, [None] * len(bands))
    for step in model.steps():
        if isinstance(step, GlobalOp):
            bands = run_global(step, bands, context=context)
            continue
        assert isinstance(step, LocalOp)
        full = torch.cat(bands, 1)

        def halo(x, n, full=full):
            start = next(
                r.start
                for r in rows
                if full[:, slice(*r)].shape == x.shape
                and full[:, slice(*r)].equal(x)
            )
            stop = start + x.shape[1]
            above = full[:, max(start - n, 0) : start]
            return above, full[:, stop : stop + n]

        bands = [step(band, halo=halo) for band in bands]
    banded = torch.cat(bands, 1).permute(0, 3, 1, 2)
    torch.testing.assert_close(banded, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize('variant', ['linear', 'neumann', 'pure'])
@pytest.mark.parametrize('ffn', ['mlp', 'dwconv'])
def test_collar_changes_nothing_inside(variant, ffn):
    """Invalid tokens at the right and bottom, of any amount; 1e-10."""
    model = (
        build(attn_cfg=dict(variant=variant), ffn=ffn, img_size=(24, 32))
        .double()
        .eval()
    )
    image = torch.randn(1, 3, 24, 32).double()
    (inside,) = model(image)
    # The position grid follows the image, so it is kept out of this.
    model.position.weight.data.zero_()
    (inside,) = model(image)
    padded = F.pad(image, (0, 64, 0, 40), value=3.0)
    valid = torch.zeros(1, 8, 12, dtype=torch.bool)
    valid[:, :3, :4] = True
    (outside,) = model(padded, valid=valid)
    torch.testing.assert_close(
        outside[:, :, :3, :4], inside, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize('variant', VARIANTS)
def test_recomputation_changes_no_number(variant):
    """Activation checkpointing: same output, same gradients."""
    plain = build(attn_cfg=dict(variant=variant), ffn='dwconv').double()
    cheap = copy.deepcopy(plain)
    cheap.with_cp = True
    image = torch.randn(2, 3, 32, 40).double()
    gradients = []
    for model in (plain, cheap):
        (tap,) = model(image)
        (tap**2).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_recomputation_saves_memory():
    """Fewer bytes are kept for the backward pass."""

    def kept_bytes(model):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            model(torch.randn(1, 3, 64, 64))
        return sum(kept)

    assert kept_bytes(build(with_cp=True)) < kept_bytes(build()) / 3


def test_frozen_stages():
    model = build(frozen_stages=2, drop_path_rate=0.2)
    model.train()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(n.startswith('layers.2.') for n in trainable)
    assert not model.layers[1].training and model.layers[2].training
    assert not model.position.training


def test_drop_path_and_dropout_are_off_in_evaluation():
    model = build(drop_rate=0.3, drop_path_rate=0.5).eval()
    image = torch.randn(1, 3, 32, 32)
    assert model(image)[0].equal(model(image)[0])
    model.train()
    assert not model(image)[0].equal(model(image)[0])


def test_final_norm_is_applied_to_the_last_tap_only():
    model = build(final_norm=True, out_indices=(0, 1, 2)).eval()
    plain = build(out_indices=(0, 1, 2)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    image = torch.randn(1, 3, 32, 32)
    normed, raw = model(image), plain(image)
    assert normed[0].equal(raw[0]) and normed[1].equal(raw[1])
    expected = model.norm(raw[2].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(normed[2], expected)


def test_pretrained_is_loaded_with_its_positions(tmp_path):
    source = build()
    path = tmp_path / 'weights.pth'
    torch.save(
        {
            'state_dict': {
                f'backbone.{k}': v for k, v in source.state_dict().items()
            }
        },
        path,
    )
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model = build(img_size=64, init_cfg=init_cfg)
    model.init_weights()
    assert model.layers[1].ffn.op.fc1.weight.equal(
        source.layers[1].ffn.op.fc1.weight
    )
    assert model.position.weight.shape == (8, 8, 24)
    assert not model.position.weight.equal(build(img_size=64).position.weight)


def test_pretrained_with_nothing_to_load_is_an_error(tmp_path):
    path = tmp_path / 'weights.pth'
    torch.save({'state_dict': {'stem.weight': torch.zeros(3)}}, path)
    model = build(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    with pytest.raises(ValueError, match=r'weights\.pth'):
        model.init_weights()


@pytest.mark.parametrize(
    ('cfg', 'message'),
    [
        (dict(arch='huge'), "arch='huge' is unknown"),
        (dict(out_indices=3), 'out_indices has 3, but there are 3 layers'),
        (dict(ffn='conv'), "ffn='conv' is unknown"),
        (dict(attn_cfg=dict(variant='fast')), "variant='fast' is unknown"),
    ],
)
def test_bad_arguments(cfg, message):
    with pytest.raises(ValueError, match=message):
        InfViT(**{**SMALL, **cfg})


def head_cfg(kind):
    common = dict(channels=16, num_classes=5)
    if kind == 'BandSegHead':
        return dict(type=kind, in_channels=[24, 24], in_index=[0, 1], **common)
    norm = dict(norm_cfg=dict(type='BN', requires_grad=True))
    if kind == 'FCNHead':
        return dict(type=kind, in_channels=24, in_index=1, **norm, **common)
    return dict(
        type=kind, in_channels=[24, 24], in_index=[0, 1], **norm, **common
    )


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('kind', ['BandSegHead', 'FCNHead', 'UPerHead'])
def test_segmentor_trains_and_predicts(variant, kind):
    """With our head and mmsegmentation's own, in an EncoderDecoder."""
    torch.manual_seed(0)
    model = MODELS.build(
        dict(
            type='EncoderDecoder',
            backbone=dict(
                type='InfViT',
                **SMALL,
                out_indices=(0, 2),
                attn_cfg=dict(variant=variant),
            ),
            decode_head=head_cfg(kind),
            train_cfg=dict(),
            test_cfg=ConfigDict(mode='whole'),
        )
    )
    sample = SegDataSample()
    sample.set_metainfo(
        dict(img_shape=(40, 48), ori_shape=(40, 48), pad_shape=(40, 48))
    )
    sample.gt_sem_seg = PixelData(data=torch.randint(5, (1, 40, 48)))
    images = torch.randn(2, 3, 40, 48)
    losses = model(images, [sample, sample], mode='loss')
    losses['decode.loss_ce'].backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for p in model.parameters()
    )
    prediction = model.eval()(images, [sample, sample], mode='predict')
    assert prediction[0].pred_sem_seg.data.shape == (1, 40, 48)


@pytest.mark.parametrize('num_upsamples', [0, 1, 2, 3])
def test_head_in_bands_equals_whole(num_upsamples):
    """Logits resized to pixels, band by band with halo; 1e-10, float64."""
    torch.manual_seed(0)
    head = BandSegHead(
        num_upsamples=num_upsamples,
        in_channels=[6, 4],
        in_index=[0, 1],
        channels=8,
        num_classes=3,
    )
    head = head.double().eval()
    stride = 16 // 2**num_upsamples
    taps = [torch.randn(1, c, 9, 5).double() for c in (6, 4)]

    def pixels(taps):
        return F.interpolate(head(taps), scale_factor=stride, mode='bilinear')

    whole = pixels(taps)
    for height in (1, 2, 4):
        pieces = []
        for rows in bands_of(9, height):
            grown = rows.grow(head.halo, 9)
            out = pixels([tap[:, :, slice(*grown)] for tap in taps])
            start = (rows.start - grown.start) * 16
            pieces.append(out[:, :, start : start + rows.num_rows * 16])
        torch.testing.assert_close(
            torch.cat(pieces, 2), whole, rtol=0, atol=1e-10
        )


def test_head_halo_is_no_larger_than_needed():
    """Without its halo, a band's logits are wrong at its border."""
    torch.manual_seed(0)
    head = BandSegHead(
        in_channels=[6], in_index=[0], channels=8, num_classes=3
    ).eval()
    assert head.halo == 1
    tap = torch.randn(1, 6, 9, 5)
    cut = head([tap[:, :, 3:]])
    assert not torch.allclose(head([tap])[:, :, 12:16], cut[:, :, :4])


def test_global_steps_are_marked():
    steps = list(build().steps())
    assert [isinstance(s, GlobalBranch) for s in steps] == [True, False] * 3
