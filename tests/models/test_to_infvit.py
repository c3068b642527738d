# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Weights of other Vision Transformers in an InfViT."""

import copy
import re
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from mmseg.models.backbones import VisionTransformer
from torch import nn

from infsa_seg.apis.to_infvit import convert_to_infvit
from infsa_seg.models import InfViT
from infsa_seg.models.utils.vit_weights import rename_vit

from .foreign_vits import (
    GRID,
    HEADS,
    LAYERS,
    SIDE,
    SIZE,
    SOURCES,
    WIDTH,
    make,
)

LN = dict(type='LN', eps=1e-6)


def infvit_of(path, variant='softmax', **kwargs):
    """A new InfViT with the weights of a file, all of them."""
    backbone = torch.load(path)['meta']['backbone'] | kwargs
    assert backbone.pop('type') == 'InfViT'
    model = InfViT(
        **backbone,
        attn_cfg=dict(variant=variant),
        norm_cfg=LN,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
    )
    model.init_weights()
    return model.eval()


@pytest.fixture
def files(tmp_path):
    return tmp_path / 'source.pth', tmp_path / 'infvit.pth'


@pytest.mark.parametrize(
    ('kind', 'wrapper'),
    [
        *((kind, '') for kind in SOURCES),
        ('timm', 'module.'),
        ('torchvision', 'model.'),
        ('mmpretrain', 'module.backbone.'),
    ],
)
def test_the_forward_is_that_of_the_source(kind, wrapper, files):
    """Within 1e-5, on the patches alone."""
    source = make(kind)
    state = {wrapper + k: v for k, v in source.state_dict().items()}
    torch.save({'model': state}, files[0])
    report = convert_to_infvit(*files, grid=GRID, num_heads=HEADS)
    assert not report.missing and report.prefix == wrapper
    variant = 'pure' if kind == 'infsa' else 'softmax'
    model = infvit_of(files[1], variant)
    image = torch.randn(2, 3, *SIZE)
    torch.testing.assert_close(
        model(image)[0], source(image), rtol=1e-5, atol=1e-5
    )
    # What has no place is named; the class token by its name.
    lost = {name.removeprefix(wrapper) for name in report.unexpected}
    assert lost == {
        name
        for name in source.state_dict()
        if name.split('.')[-1]
        in ('cls_token', 'class_token', 'dist_token', 'mask_token')
        or name.startswith('head')
    }
    told = [note for note in report.notes if 'token left out' in note]
    assert len(told) == len(lost & set(TOKENS))


TOKENS = (*('cls_token', 'class_token', 'dist_token', 'embeddings.cls_token'),)


@pytest.mark.parametrize(
    ('with_cls_token', 'qkv_bias'), [(True, True), (False, False)]
)
def test_mmsegmentation_itself(with_cls_token, qkv_bias, files):
    torch.manual_seed(0)
    kwargs = dict(
        img_size=SIZE,
        patch_size=SIDE,
        embed_dims=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        qkv_bias=qkv_bias,
        final_norm=True,
        norm_cfg=LN,
    )
    source = VisionTransformer(with_cls_token=with_cls_token, **kwargs)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = source.state_dict()
    config = 'model = dict(\n    backbone=dict(\n        img_size=(12, 20)))'
    torch.save(
        {
            'meta': {'cfg': config},
            'state_dict': {f'backbone.{k}': v for k, v in state.items()}
            | {'decode_head.conv_seg.weight': torch.ones(3)},
        },
        files[0],
    )
    report = convert_to_infvit(*files)
    assert not report.missing
    # They make the token whether it is used or not.
    assert set(report.unexpected) == {
        'decode_head.conv_seg.weight',
        'backbone.cls_token',
    }
    assert ('out_proj has no bias' in str(report)) is not qkv_bias
    # InfViT has no token, so their forward without it.
    plain = VisionTransformer(with_cls_token=False, **kwargs)
    plain.load_state_dict(state)
    plain.eval()
    image = torch.randn(2, 3, *SIZE)
    model = infvit_of(files[1], num_heads=HEADS)
    torch.testing.assert_close(
        model(image)[0], plain(image)[0], rtol=1e-5, atol=1e-5
    )


def split(state, old, names):
    """The three of a packed projection, named after ``old``."""
    for name in [name for name in state if f'.{old}.' in name]:
        for new, part in zip(names, state.pop(name).chunk(3), strict=True):
            state[name.replace(old, new)] = part


# How the same weights are called elsewhere, by regular expressions.
RECORDED = {
    'DINOv2 of transformers': (
        'DINOv2',
        [
            (r'blocks\.', 'encoder.layer.'),
            (r'attn\.proj', 'attention.output.dense'),
            (r'ls(\d)\.gamma', r'layer_scale\1.lambda1'),
            (r'^norm', 'layernorm'),
            (r'patch_embed\.proj', 'embeddings.patch_embeddings.projection'),
            (r'^(cls|mask)_token', r'embeddings.\1_token'),
            (r'pos_embed', 'embeddings.position_embeddings'),
        ],
        ('attn.qkv', 'attention.attention.{}', ['query', 'key', 'value']),
    ),
    'ViT converted by infsa': (
        'timm',
        [(r'attn\.proj', 'attn.out_proj')],
        ('attn.qkv', 'attn.{}', ['q_proj', 'k_proj', 'v_proj']),
    ),
    'torchvision before 0.12': (
        'torchvision',
        [(r'mlp\.0', 'mlp.linear_1'), (r'mlp\.3', 'mlp.linear_2')],
        None,
    ),
}


@pytest.mark.parametrize('kind', RECORDED)
def test_the_same_weights_under_other_names(kind):
    origin, names, packed = RECORDED[kind]
    state = make(origin).state_dict()
    expected = rename_vit(state, GRID).state
    for old, new in names:
        state = {re.sub(old, new, name): x for name, x in state.items()}
    if packed is not None:
        old, new, parts = packed
        split(state, old, [new.format(part) for part in parts])
    result = rename_vit(state, GRID).state
    assert result.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in result.items())


@pytest.mark.parametrize('variant', ['linear', 'neumann'])
def test_any_attention_takes_the_weights(variant, files):
    source = make('infsa')
    torch.save(source.state_dict(), files[0])
    convert_to_infvit(*files, grid=GRID, num_heads=HEADS)
    model = infvit_of(files[1], variant)
    attention = model.layers[1].attn.op
    theirs = source.encoder.layers[1].attn
    assert attention.q_proj.weight.equal(theirs.q_proj.weight)
    if variant == 'linear':
        assert attention.discount_logit.equal(theirs.discount_logit)


@pytest.mark.parametrize(
    ('content', 'grid'),
    [
        ({'args': {'img_size': [12, 20]}}, GRID),
        ({'pretrained_cfg': {'input_size': (3, 12, 20)}}, GRID),
        ({'config': {'image_size': 12}}, None),
        ({'args': {'img_size': [12, 20]}, 'config': {'image_size': 8}}, None),
    ],
)
def test_grid_from_what_the_file_says(content, grid, files):
    source = make('timm')
    torch.save({'state_dict': source.state_dict(), **content}, files[0])
    if grid is None:
        with pytest.raises(ValueError, match=r'positions'):
            convert_to_infvit(*files)
    else:
        assert convert_to_infvit(*files).backbone['img_size'] == SIZE


def test_grid_from_options_and_shape():
    state = make('timm').state_dict()
    assert rename_vit(state, img_size=(14, 23)).shape.grid == GRID
    other = rename_vit(state, grid=(5, 3))
    assert other.shape.grid == (5, 3)
    grid = other.state['position.weight']
    assert grid[1, 0].equal(state['pos_embed'][0, 4])
    state['pos_embed'] = state['pos_embed'][:, 1:].unflatten(1, GRID)
    assert rename_vit(state).shape.grid == GRID
    # Positions of patches only, beside a class token.
    state['pos_embed'] = state['pos_embed'].flatten(1, 2)
    assert rename_vit(state, GRID).state['position.weight'].shape == (
        *GRID,
        WIDTH,
    )


def test_one_more_position_is_no_class_token():
    state = make('timm').state_dict()
    del state['cls_token']
    with pytest.raises(ValueError, match='has 16 positions, 0 of them of oth'):
        rename_vit(state, GRID)


def refused(name, value=None):
    def change(state):
        state[name] = torch.ones(WIDTH) if value is None else value

    return change


def rename(old, new):
    def change(state):
        state[new] = state.pop(old)

    return change


REFUSED = {
    'has 15 positions of patches of 4 pixels, and does not say': lambda s: 0,
    'has registers': refused('register_tokens', torch.ones(1, 4, WIDTH)),
    r'has registers \(reg_token\)': refused('reg_token'),
    'relative positions': refused(
        'blocks.0.attn.relative_position_bias_table'
    ),
    'rotary positions': refused('rope_embed.periods'),
    'normalised queries and keys': refused('blocks.0.attn.q_norm.weight'),
    'a gated MLP': refused('blocks.0.mlp.w12.weight'),
    'a normalisation before the layers': refused('norm_pre.weight'),
    r'has blocks.1.attn.temperature in a layer': refused(
        'blocks.1.attn.temperature'
    ),
    'has no learned positions': lambda state: state.pop('pos_embed'),
    'has no projection of patches': lambda state: state.pop(
        'patch_embed.proj.weight'
    ),
    r'has the layers \[0, 7\]; some are missing': lambda state: [
        rename(name, name.replace('.1.', '.7.'))(state)
        for name in list(state)
        if name.startswith('blocks.1.')
    ],
    'not square ones': refused(
        'patch_embed.proj.weight', torch.ones(WIDTH, 3, 4, 2)
    ),
    'would be': refused('blocks.0.mlp.fc2.weight', torch.ones(3, 3)),
}


@pytest.mark.parametrize('reason', REFUSED)
def test_transformers_of_other_kinds_are_refused(reason, files):
    state = make('timm').state_dict()
    REFUSED[reason](state)
    torch.save(state, files[0])
    with pytest.raises(ValueError, match=reason) as error:
        convert_to_infvit(
            *files, grid=None if 'does not say' in reason else GRID
        )
    text = str(error.value)
    assert text.startswith(f'{files[0]}: ') and '\n' not in text
    assert not files[1].exists()


def test_what_the_source_lacks_is_missing(files):
    state = make('timm').state_dict()
    del state['blocks.1.norm2.bias']
    torch.save(state, files[0])
    report = convert_to_infvit(*files, grid=GRID)
    assert report.missing == ('layers.1.ffn.norm.bias',)
    assert f'loaded {len(report.loaded)} of {len(report.loaded) + 1}' in str(
        report
    )
    assert 'num_heads is not in the weights' in str(report)


def test_half_precision_stays():
    state = {k: v.half() for k, v in make('DINOv2').state_dict().items()}
    result = rename_vit(state, GRID)
    assert {value.dtype for value in result.state.values()} == {torch.float16}


def test_files_of_other_kinds(files, tmp_path):
    torch.save({'fc.weight': torch.ones(2)}, files[0])
    with pytest.raises(ValueError, match='nothing in it is known of a Vision'):
        convert_to_infvit(*files)
    torch.save({'model': {}, 'args': Namespace(img_size=3)}, files[0])
    with pytest.raises(ValueError, match='refused, it holds a'):
        convert_to_infvit(*files)
    with pytest.raises(FileNotFoundError, match='no such checkpoint'):
        convert_to_infvit(tmp_path / 'none.pth', files[1])
    with pytest.raises(ValueError, match='safetensors'):
        convert_to_infvit(tmp_path / 'model.safetensors', files[1])
    files[1].write_bytes(b'mine')
    with pytest.raises(FileExistsError, match='exists; use --overwrite'):
        convert_to_infvit(*files)
    assert files[1].read_bytes() == b'mine'
    torch.save(make('timm').state_dict(), files[0])
    with pytest.raises(ValueError, match='num_heads=5 does not divide'):
        convert_to_infvit(*files, GRID, num_heads=5, overwrite=True)
    assert files[1].read_bytes() == b'mine'
    convert_to_infvit(*files, GRID, overwrite=True)
    assert infvit_of(files[1], num_heads=HEADS)


def test_tool(files, monkeypatch, capsys):
    root = Path(__file__).parents[2]
    tool = root / 'tools' / 'model_converters' / 'to_infvit.py'

    def run(*args):
        argv = [str(tool), *map(str, args)]
        monkeypatch.setattr(sys, 'argv', argv)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(tool), run_name='__main__')
        return stop.value.code, capsys.readouterr()

    torch.save(make('torchvision').state_dict(), files[0])
    status, text = run(*files)
    assert status == 1
    assert 'give --grid ROWS COLUMNS or --img-size' in text.err
    assert text.err.count('\n') == 1
    status, text = run(*files, '--img-size', 12, 20, '--num-heads', HEADS)
    assert status == 0
    lines = text.out.splitlines()
    assert lines[0].endswith('loaded 37 of 37 entries')
    assert lines[1].startswith('  3 of the file unexpected in InfViT: class_')
    assert lines[2] == (
        '  class token left out with its position; InfViT has none'
    )
    assert lines[3] == (
        "  backbone=dict(type='InfViT', img_size=(12, 20), patch_size=4, "
        'in_channels=3, embed_dims=16, num_layers=2, mlp_ratio=2.0, '
        'qkv_bias=True, final_norm=True, num_heads=4)'
    )
    infvit_of(files[1])
    assert run(*files, '--grid', 3)[0] == 2
    assert run(*files, '--grid', 3, 5, '--img-size', 12, 20)[0] == 2


def test_real_timm(files):
    timm = pytest.importorskip('timm')
    source = timm.create_model(
        'vit_tiny_patch16_224', img_size=64, class_token=False, global_pool=''
    ).eval()
    torch.save(source.state_dict(), files[0])
    report = convert_to_infvit(*files, grid=(4, 4), num_heads=3)
    assert not report.missing
    image = torch.randn(1, 3, 64, 64)
    expected = source.forward_features(image).mT.unflatten(-1, (4, 4))
    torch.testing.assert_close(
        infvit_of(files[1])(image)[0], expected, rtol=1e-5, atol=1e-5
    )


def test_real_torchvision(files):
    try:
        from torchvision.models import VisionTransformer as Theirs
    except (ImportError, RuntimeError) as error:  # beside another torch
        pytest.skip(str(error))
    source = Theirs(16, SIDE, LAYERS, HEADS, WIDTH, 32).eval()
    torch.save(source.state_dict(), files[0])
    report = convert_to_infvit(*files, grid=(4, 4), num_heads=HEADS)
    assert not report.missing
    image = torch.randn(1, 3, 16, 16)
    encoder = copy.deepcopy(source.encoder)
    position = encoder.pos_embedding.data
    encoder.pos_embedding.data = position[:, 1:]
    expected = encoder(source._process_input(image)).mT.unflatten(-1, (4, 4))
    torch.testing.assert_close(
        infvit_of(files[1])(image)[0], expected, rtol=1e-5, atol=1e-5
    )
