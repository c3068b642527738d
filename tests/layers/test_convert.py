# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""InfSA in the place of other models' attention."""

import copy
import io

import pytest
import torch
from mmcv.cnn.bricks.transformer import BaseTransformerLayer
from mmcv.cnn.bricks.transformer import MultiheadAttention as MMCVAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.swin import WindowMSA
from torch import nn

import infsa_seg
from infsa_seg.layers import InfSAAttention
from infsa_seg.layers.convert import convert

from . import foreign_layers as foreign
from .test_attention import MERGEABLE, QUADRATIC
from .test_multihead import EACH

WIDTH = 16
GRID = (4, 6)


class Model(nn.Module):
    """Holds one layer as `layer`, under another module."""

    def __init__(self, layer):
        super().__init__()
        self.body = nn.Module()
        self.body.layer = layer

    def forward(self, *args, **kwargs):
        return self.body.layer(*args, **kwargs)


def drop_path():
    return dict(type='DropPath', drop_prob=0.5)


# Layers, how they are called on tokens, and their projections by name: the
# q, k and v in one, then that of the output.
KINDS = {
    'timm': (lambda: foreign.Attention(WIDTH), (), ['qkv', 'proj']),
    'timm without bias': (
        lambda: foreign.Attention(WIDTH, qkv_bias=False),
        (),
        ['qkv', 'proj'],
    ),
    'dinov2': (lambda: foreign.MemEffAttention(WIDTH), (), ['qkv', 'proj']),
    'mmpretrain': (
        lambda: foreign.MultiheadAttention(WIDTH),
        (),
        ['qkv', 'proj'],
    ),
    'transformers ViT': (
        lambda: foreign.ViTAttention(WIDTH),
        (),
        [
            *('attention.query', 'attention.key', 'attention.value'),
            'output.dense',
        ],
    ),
    'transformers DINOv2': (
        lambda: foreign.Dinov2Attention(WIDTH, qkv_bias=False),
        (),
        [
            *('attention.query', 'attention.key', 'attention.value'),
            'output.dense',
        ],
    ),
    'transformers SegFormer': (
        lambda: foreign.SegformerAttention(WIDTH),
        GRID,
        ['self.query', 'self.key', 'self.value', 'output.dense'],
    ),
    'transformers SegFormer, last stage': (
        lambda: foreign.SegformerAttention(WIDTH, sr_ratio=1),
        GRID,
        ['self.query', 'self.key', 'self.value', 'output.dense'],
    ),
    'PVT': (
        lambda: foreign.PyramidAttention(WIDTH),
        GRID,
        ['q', 'kv', 'proj'],
    ),
    'PVT, last stage': (
        lambda: foreign.PyramidAttention(WIDTH, sr_ratio=1),
        GRID,
        ['q', 'kv', 'proj'],
    ),
    'mmsegmentation SegFormer': (
        lambda: EfficientMultiheadAttention(
            WIDTH, 4, sr_ratio=2, dropout_layer=drop_path()
        ),
        (GRID,),
        ['attn.in_proj', 'attn.out_proj'],
    ),
    'mmsegmentation SegFormer, last stage': (
        lambda: EfficientMultiheadAttention(WIDTH, 4, qkv_bias=True),
        (GRID,),
        ['attn.in_proj', 'attn.out_proj'],
    ),
    'mmcv': (
        lambda: MMCVAttention(WIDTH, 4, batch_first=True),
        (),
        ['attn.in_proj', 'attn.out_proj'],
    ),
    'mmcv, sequence first': (
        lambda: MMCVAttention(WIDTH, 4),
        (),
        ['attn.in_proj', 'attn.out_proj'],
    ),
    'torchvision': (
        lambda: foreign.EncoderBlock(WIDTH),
        (),
        ['self_attention.in_proj', 'self_attention.out_proj'],
    ),
}


def make(kind, dtype=torch.float32, seed=0):
    """A model, its arguments, and the weights of its projections."""
    torch.manual_seed(seed)
    layer, arguments, names = KINDS[kind]
    model = Model(layer()).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # fresh ones let all scores look alike
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    x = torch.randn(2, 24, WIDTH, dtype=dtype)
    state = {
        name.removeprefix('body.layer.').replace('in_proj_', 'in_proj.'): value
        for name, value in model.state_dict().items()
    }

    def pick(part):
        found = [state.get(f'{name}.{part}') for name in names]
        return [value.clone() for value in found if value is not None]

    none = torch.empty(0)
    weights = torch.cat(pick('weight'))
    biases = torch.cat([*pick('bias'), none])
    return model.eval(), (x, *arguments), [weights, biases]


def attentions(model):
    return [m for m in model.modules() if isinstance(m, InfSAAttention)]


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize('kind', KINDS)
def test_softmax_gives_what_was_there(kind):
    model, arguments, weights = make(kind)
    expected = model(*arguments)
    report = infsa_seg.convert(model, 'softmax')
    assert [row.variant for row in report.converted] == ['softmax']
    assert not report.skipped
    assert report.converted[0].name.startswith('body.layer')
    output = model(*arguments)
    assert type(output) is type(expected)
    torch.testing.assert_close(
        first(output), first(expected), rtol=1e-6, atol=2e-6
    )
    # Bit for bit.
    (layer,) = attentions(model)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    biases = [p.bias for p in projections if p.bias is not None]
    biases = [bias for bias in biases if bias.requires_grad]
    mine = [
        torch.cat([p.weight for p in projections]),
        torch.cat([*biases, torch.empty(0)]),
    ]
    for a, b in zip(mine, weights, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize(
    ('kind', 'cfg'),
    [('timm', cfg) for cfg in EACH]
    + [('mmcv', cfg) for cfg in EACH]
    + [(kind, dict(variant='linear')) for kind in KINDS],
)
def test_every_variant_learns_all_that_was_copied(kind, cfg):
    model, arguments, _ = make(kind)
    before = model(*arguments)
    infsa_seg.convert(model, **cfg)
    assert attentions(model)[0].variant == cfg['variant']
    out = first(model.train()(*arguments))
    assert out.shape == first(before).shape
    if cfg['variant'] != 'softmax':
        assert not torch.allclose(out, first(before), atol=1e-3)
    (out * torch.randn_like(out)).sum().backward()
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (parameter.grad is None or not parameter.grad.isfinite().all())
    ]
    assert not lost
    for projection in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
        layer = getattr(attentions(model)[0], projection)
        assert layer.weight.grad.any()


@pytest.mark.parametrize(
    'kind', ['transformers SegFormer', 'PVT', 'mmsegmentation SegFormer']
)
def test_several_hops_over_a_reduced_grid_are_refused(kind):
    model, _, _ = make(kind)
    with pytest.raises(ValueError, match='several hops need as many queries'):
        convert(model, 'neumann', hops='inf')


@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(bias=False),
        dict(kdim=5),
        dict(kdim=5, vdim=7, bias=False),
    ],
)
def test_multihead_attention_of_pytorch(batch_first, kwargs):
    """All its ways of being called; weights too, to 1e-6."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(
        WIDTH, 4, batch_first=batch_first, dropout=0.2, **kwargs
    )
    model = Model(layer).eval()
    query = torch.randn(2, 5, WIDTH)
    key = torch.randn(2, 7, kwargs.get('kdim', WIDTH))
    value = torch.randn(2, 7, kwargs.get('vdim', WIDTH))
    tensors = [query, key, value]
    if not batch_first:
        tensors = [x.transpose(0, 1) for x in tensors]
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    expected, weights = model(*tensors, key_padding_mask=mask)
    report = convert(model, 'softmax')
    out, mine = model(*tensors, key_padding_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine, weights, rtol=1e-6, atol=1e-6)
    assert [row.text for row in report.notes] == [
        'dropout 0.2 of the weights is left out'
    ]
    with pytest.raises(ValueError, match='takes no attn_mask'):
        model(*tensors, attn_mask=torch.zeros(5, 7))


def test_a_bias_that_was_not_there_is_not_learnt():
    model = Model(nn.MultiheadAttention(WIDTH, 4, bias=False))
    convert(model, 'linear')
    (layer,) = attentions(model)
    assert layer.q_proj.bias is None
    assert not layer.out_proj.bias.any()
    assert not layer.out_proj.bias.requires_grad


OPTIONS = [MERGEABLE[i] for i in (1, 4, 9, 13)] + QUADRATIC[1:3]
# Without what depends on the most tokens in a batch.
ENCODERS = [
    dict(variant='linear'),
    dict(variant='neumann', log_n=False),
    dict(variant='softmax'),
]


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
@pytest.mark.parametrize('cfg', ENCODERS)
@pytest.mark.parametrize('norm_first', [False, True])
def test_encoder_of_pytorch_takes_no_fast_path(cfg, norm_first, monkeypatch):
    """Evaluation without gradients is what it is with them; 1e-6."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            WIDTH, 4, 32, 0.0, batch_first=True, norm_first=norm_first
        ),
        2,
        enable_nested_tensor=not norm_first,
    ).eval()
    x = torch.randn(2, 6, WIDTH)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=hidden)
    report = convert(encoder, **cfg)
    assert len(report.converted) == 2
    assert not encoder.use_nested_tensor and not encoder.enable_nested_tensor
    assert bool(report.notes) is not norm_first

    def fused(*args, **kwargs):
        raise AssertionError('the fused path ran')

    monkeypatch.setattr(torch, '_transformer_encoder_layer_fwd', fused)
    monkeypatch.setattr(torch, '_nested_tensor_from_mask', fused)
    called = []
    for layer in attentions(encoder):
        layer.register_forward_hook(lambda *args: called.append(args[0]))
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=hidden)
    assert called == attentions(encoder)
    # With gradients there is no fast path.
    slow = encoder(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out, slow, rtol=0, atol=1e-6)
    alone = encoder(x[1:, :4])
    torch.testing.assert_close(out[1:, :4], alone, rtol=0, atol=1e-5)
    if cfg['variant'] == 'softmax':
        torch.testing.assert_close(
            out[~hidden], before[~hidden], rtol=0, atol=1e-5
        )
    with pytest.raises(ValueError, match='takes no attn_mask'):
        encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(6))


@pytest.mark.filterwarnings('ignore:"residual" is deprecated')
def test_mmcv_with_positions_masks_and_its_own_layers():
    """Every argument of the call, to 1e-6."""
    torch.manual_seed(0)
    layer = MMCVAttention(
        WIDTH, 4, batch_first=True, dropout_layer=drop_path()
    )
    model = Model(layer).eval()
    twin = copy.deepcopy(model)
    convert(twin, 'softmax')
    x, other = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    near, far = torch.randn_like(x), torch.randn_like(other)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 3:] = True
    calls = [
        dict(query=x, query_pos=near),
        dict(query=x, key=x, value=x, query_pos=near, key_pos=near),
        dict(query=x, key=x, value=near, identity=near),
        dict(query=x, key=other),
        dict(query=x, key=other, query_pos=near, key_pos=far),
        dict(query=x, key=other, value=far, key_padding_mask=mask),
        dict(query=x, residual=near),
    ]
    for kwargs in calls:
        torch.testing.assert_close(
            twin(**kwargs), model(**kwargs), rtol=1e-6, atol=2e-6
        )
    with pytest.raises(ValueError, match='takes no attn_mask'):
        twin(x, attn_mask=torch.zeros(5, 5))

    layer = BaseTransformerLayer(
        dict(type='MultiheadAttention', embed_dims=WIDTH, num_heads=4),
        dict(type='FFN', embed_dims=WIDTH, feedforward_channels=8),
        operation_order=(
            *('self_attn', 'norm', 'cross_attn', 'norm', 'ffn', 'norm'),
        ),
        batch_first=True,
    )
    report = convert(layer, 'neumann')
    assert [row.name for row in report.converted] == ['attentions.0']
    assert [tuple(row) for row in report.skipped] == [
        (
            'attentions.1',
            'MultiheadAttention',
            'cross-attention, which is called with masks',
        )
    ]
    assert layer(x, other, other).shape == x.shape


def test_linear_infsa_inside_mmcv_forms_no_keys():
    """The same tensor thrice is seen to be one set of tokens."""
    model = Model(MMCVAttention(WIDTH, 4))
    convert(model, 'linear')
    (layer,) = attentions(model)

    def fail(*args):
        raise AssertionError('keys were projected')

    layer.k_proj.register_forward_hook(fail)
    x = torch.randn(5, 2, WIDTH)
    assert model(x, x, x).shape == x.shape


def test_weights_that_transformers_ask_for():
    model, (x,), _ = make('transformers DINOv2')
    _, expected = model(x, output_attentions=True)
    twin = copy.deepcopy(model)
    convert(model, 'softmax')
    _, weights = model(x, output_attentions=True)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    convert(twin, 'linear')
    with pytest.raises(ValueError, match='has no matrix of weights'):
        twin(x, output_attentions=True)


@pytest.mark.parametrize(
    ('kind', 'kwargs'),
    [
        ('timm', dict(attn_mask=torch.zeros(24, 24))),
        ('timm', dict(is_causal=True)),
        ('dinov2', dict(attn_bias=torch.zeros(24, 24))),
        ('transformers ViT', dict(head_mask=torch.ones(4))),
        ('transformers ViT', dict(attention_mask=torch.ones(2, 24))),
        ('transformers SegFormer', dict(output_attentions=True)),
    ],
)
def test_what_cannot_be_honoured_in_a_call_is_refused(kind, kwargs):
    model, arguments, _ = make(kind)
    convert(model, 'neumann')
    (name,) = kwargs
    with pytest.raises(ValueError, match=f'takes no {name}'):
        model(*arguments, **kwargs)


def test_a_grid_in_place_of_tokens_is_refused():
    model, (x,), _ = make('timm')
    convert(model)
    with pytest.raises(ValueError, match=r'tokens \(B, N, C\), not'):
        model(x.unflatten(1, GRID))


def test_other_names_for_heads_and_a_scale_that_divides():
    model = Model(foreign.DividingAttention(WIDTH))
    x = torch.randn(2, 5, WIDTH)
    expected = model(x)
    convert(model, 'softmax')
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_a_projection_that_starts_at_zero():
    layer = foreign.Attention(WIDTH)
    nn.init.zeros_(layer.proj.weight)
    nn.init.zeros_(layer.proj.bias)
    assert convert(Model(layer)).converted


def test_weights_of_two_layers_stay_shared():
    layers = nn.ModuleList([foreign.Attention(WIDTH) for _ in range(3)])
    layers[1].qkv.weight = layers[0].qkv.weight
    report = convert(layers)
    assert [row.name for row in report.converted] == ['2']
    assert {row.reason for row in report.skipped} == {
        'shares weights with another layer'
    }


def test_one_layer_at_two_places_is_one_layer():
    layer = foreign.Attention(WIDTH)
    model = nn.ModuleDict({'a': layer, 'b': nn.Sequential(layer)})
    report = convert(model)
    assert len(report.converted) == 1
    assert model['a'] is model['b'][0] is not layer


def test_dtype_mode_and_frozen_weights_stay():
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        model, (x,), weights = make('timm', dtype)
        model.body.layer.qkv.requires_grad_(False)
        convert(model, 'neumann')
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not any(module.training for module in model.modules())
        assert model(x).dtype == dtype
        (layer,) = attentions(model)
        assert not layer.q_proj.weight.requires_grad
        assert layer.out_proj.weight.requires_grad
        assert layer.landmarks.requires_grad
        assert layer.q_proj.weight.equal(weights[0][:WIDTH])
    model, _, _ = make('mmpretrain')
    model.train()
    model.body.layer.proj_drop.eval()
    drop = model.body.layer.proj_drop
    convert(model, 'linear')
    assert model.body.layer.after[0] is drop and not drop.training
    assert all(
        module.training for module in model.modules() if module is not drop
    )


def test_a_model_without_memory_keeps_its_device():
    with torch.device('meta'):
        model = Model(foreign.Attention(WIDTH))
    convert(model, 'linear')
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize('kind', ['PVT', 'mmcv', 'transformers ViT'])
def test_state_dict_deepcopy_and_file(kind):
    model, arguments, _ = make(kind)
    convert(model, 'neumann')
    out = first(model(*arguments))
    twin = copy.deepcopy(model)
    assert first(twin(*arguments)).equal(out)
    other, _, _ = make(kind, seed=1)
    convert(other, 'neumann')
    assert not first(other(*arguments)).equal(out)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert first(other(*arguments)).equal(out)


def stack(count=3):
    return nn.ModuleDict(
        {
            'blocks': nn.ModuleList(
                [foreign.Attention(WIDTH) for _ in range(count)]
            ),
            'head': MMCVAttention(WIDTH, 4),
        }
    )


@pytest.mark.parametrize(
    ('kwargs', 'names'),
    [
        (dict(include='blocks.*'), ['blocks.0', 'blocks.1', 'blocks.2']),
        (dict(include=['*.1', 'head']), ['blocks.1', 'head']),
        (dict(exclude='head'), ['blocks.0', 'blocks.1', 'blocks.2']),
        (dict(exclude=('blocks.[01]', 'head')), ['blocks.2']),
        (dict(include='blocks.*', exclude='*.0'), ['blocks.1', 'blocks.2']),
        (dict(target_types=foreign.Attention), [f'blocks.{i}' for i in '012']),
        (dict(target_types='MultiheadAttention'), ['head']),
        (dict(target_types=[nn.MultiheadAttention]), ['head.attn']),
        (
            dict(target_types=['Attention', MMCVAttention], exclude='*.2'),
            ['blocks.0', 'blocks.1', 'head'],
        ),
    ],
)
def test_choice_of_layers(kwargs, names):
    model = stack()
    report = convert(model, **kwargs)
    assert [row.name for row in report.converted] == names
    assert not report.skipped
    for name, module in model.named_modules():
        if isinstance(module, InfSAAttention):
            assert name.removesuffix('.attn') in names or name in names


def test_inner_halves_name_the_layers_of_transformers():
    model = nn.ModuleList([foreign.ViTAttention(WIDTH), *stack().values()])
    report = convert(model, target_types=foreign.ViTSelfAttention)
    assert [row.name for row in report.converted] == ['0']


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(variant='lienar'), "variant='lienar' is unknown"),
        (dict(hops=0), 'hops=0 is no positive integer'),
        (dict(hopps=2), r"takes other options than \['hopps'\]"),
        (dict(variant='softmax', discount=0.5, hops=2), 'other options'),
        (dict(num_heads=2), 'num_heads is taken from the layer'),
        (dict(batch_first=True), 'batch_first is taken from the layer'),
        (dict(include='block.*'), "include='block.*' matches no module"),
        (dict(exclude=['head', 'tail']), "exclude='tail' matches no module"),
        (dict(include=3), 'include is 3, not a pattern'),
        (dict(include=[3]), 'include has 3, not a pattern'),
        (dict(target_types=[3]), 'target_types has 3'),
        (dict(target_types=3), 'target_types is 3'),
        (dict(target_types='Attntion'), 'no attention layer was found'),
        (dict(exclude='*'), 'no attention layer was found'),
    ],
)
def test_bad_arguments(kwargs, message):
    model = stack()
    before = list(model.modules())
    with pytest.raises(ValueError, match=message) as error:
        convert(model, **kwargs)
    assert '\n' not in str(error.value)
    assert list(model.modules()) == before


def test_models_that_cannot_be_converted():
    with pytest.raises(ValueError, match='model is a str, not a module'):
        convert('vit')
    with pytest.raises(ValueError, match='is itself an attention layer'):
        convert(foreign.Attention(WIDTH))
    with pytest.raises(ValueError, match='no attention layer was found'):
        convert(nn.Sequential(nn.Linear(3, 3)))
    model = stack()
    convert(model)
    with pytest.raises(ValueError, match='no attention layer was found'):
        convert(model)


def test_the_report_is_a_table():
    model = nn.Module()
    model.block = foreign.EncoderBlock(WIDTH)
    model.block.self_attention.dropout = 0.1
    model.window = WindowMSA(WIDTH, 4, (2, 2))
    assert str(convert(model, 'linear')).splitlines() == [
        '1 converted, 1 skipped',
        "  block.self_attention  MultiheadAttention  converted to 'linear'",
        '  window                WindowMSA           skipped: attention with '
        'a bias of relative positions',
        '  block.self_attention                      note: dropout 0.1 of the '
        'weights is left out',
    ]


def test_the_package_exports_it():
    assert infsa_seg.convert is convert
    assert 'convert' in infsa_seg.__all__
    with pytest.raises(AttributeError, match='has no attribute'):
        _ = infsa_seg.convertt


def test_options_reach_the_layer():
    model = stack(1)
    convert(model, 'neumann', num_landmarks=5, hops='inf', discount=0.25)
    for layer in attentions(model):
        assert layer.landmarks.shape[1] == 5
        torch.testing.assert_close(
            layer.discount, torch.full((4,), 0.25), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize('cfg', OPTIONS)
def test_options_make_the_layer_that_they_make_elsewhere(cfg):
    model, (x,), _ = make('timm', torch.float64)
    layer = model.body.layer
    convert(model, **cfg)
    mine = InfSAAttention(WIDTH, 4, **cfg).double().eval()
    state = attentions(model)[0].state_dict()
    mine.load_state_dict(state)
    assert mine(x).equal(model(x))
    assert layer.qkv.weight[:WIDTH].equal(mine.q_proj.weight)


def test_mmsegmentation_backbones_whole():
    from mmseg.models.backbones import MixVisionTransformer, VisionTransformer

    torch.manual_seed(0)
    for model in (
        VisionTransformer(
            img_size=32,
            patch_size=8,
            embed_dims=WIDTH,
            num_layers=2,
            num_heads=2,
            attn_drop_rate=0.1,
        ),
        MixVisionTransformer(embed_dims=8, num_layers=[1, 1, 1, 1]),
    ):
        x = torch.randn(1, 3, 32, 32)
        model.eval()
        expected = model(x)
        twin = copy.deepcopy(model)
        report = convert(model, 'softmax')
        assert not report.skipped
        for a, b in zip(model(x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        convert(twin, 'linear')
        assert [y.shape for y in twin(x)] == [y.shape for y in expected]


def test_real_timm():
    timm = pytest.importorskip('timm')
    model = timm.create_model('vit_tiny_patch16_224', img_size=32).eval()
    _same_after_conversion(model, torch.randn(1, 3, 32, 32), 12)


def test_real_torchvision():
    try:
        from torchvision.models import VisionTransformer
    except (ImportError, RuntimeError) as error:  # beside another torch
        pytest.skip(str(error))
    model = VisionTransformer(32, 8, 2, 2, WIDTH, 32).eval()
    nn.init.normal_(model.heads.head.weight)
    _same_after_conversion(model, torch.randn(1, 3, 32, 32), 2)


def test_real_transformers():
    transformers = pytest.importorskip('transformers')
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    )
    model = transformers.ViTModel(config).eval()
    x = torch.randn(1, 3, 32, 32)
    expected = model(x).last_hidden_state
    assert len(convert(model, 'softmax').converted) == 2
    torch.testing.assert_close(
        model(x).last_hidden_state, expected, rtol=1e-5, atol=1e-5
    )


def _same_after_conversion(model, x, count):
    expected = model(x)
    assert len(convert(model, 'softmax').converted) == count
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
