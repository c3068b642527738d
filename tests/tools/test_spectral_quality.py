# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import importlib.util

import numpy as np
import pytest
import torch
from mmengine.logging import MMLogger
from torch import nn

from infsa_seg.apis import init_model
from infsa_seg.apis.pictures import read_image
from infsa_seg.layers import InfSAAttention
from infsa_seg.ops import crelu, landmark_keys, landmark_queries
from tests.apis.conftest import REPO
from tests.apis.test_label import write_classifier

TOOL = 'analysis/spectral_quality.py'


@pytest.fixture
def quality():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location(
        'spectral_quality', REPO / 'tools' / TOOL
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def weights(project, tmp_path):
    """A checkpoint of the project's model, as it starts."""
    path = tmp_path / 'weights.pth'
    torch.save(init_model(project / 'tiny.py').state_dict(), path)
    # The tool would write to the output that is captured here.
    MMLogger._instance_dict.clear()
    return path


def table(outcome):
    """The header and the rows of what a tool printed last."""
    assert outcome.status == 0
    lines = [x for x in outcome.out.splitlines() if x.startswith('|')]
    header, rule, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')] for line in lines
    )
    assert rule == ['---'] * len(header)
    return header, rows


def left_eigenvector(matrix):
    values, vectors = torch.linalg.eig(matrix.mT)
    return vectors[:, values.real.argmax()].real


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=-1).abs().item()


def test_table_of_the_design(tool):
    """As DESIGN 3.3 has it: linear needs a shared mean, crelu does not.

    Draws of 1024 tokens differ from each other by 0.02 and 0.003.
    """
    header, rows = table(tool(TOOL, 'random', '--heads', 2))
    assert header == [
        *('shared mean', 'linear', 'crelu', 'landmark', 'constant')
    ]
    assert [row[0] for row in rows] == ['0', '0.1', '0.2', '0.3', '0.5']
    _, linear, crelu, _, _ = np.array(rows, float).T
    np.testing.assert_allclose(linear, [0.59, 0.83, 0.94, 0.99, 1], atol=0.04)
    np.testing.assert_allclose(
        crelu, [0.999, 0.993, 0.985, 0.982, 0.991], atol=0.005
    )
    again = tool(TOOL, 'random', '--tokens', 64, '--heads', 1)
    assert table(again) == table(
        tool(TOOL, 'random', '--tokens', 64, '--heads', 1)
    )
    assert table(again) != table(
        tool(TOOL, 'random', '--tokens', 64, '--heads', 1, '--seed', 1)
    )


@pytest.mark.parametrize('hops', [1, 'inf'])
@pytest.mark.parametrize('log_n', [False, True])
def test_against_dense_matrices(quality, hops, log_n):
    """Each operator's N x N graph, and numpy's kind of eigenvector; 1e-8."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, 20, 4, dtype=torch.float64, generator=generator)
    q, k = q + 0.3, k + 0.3
    layer = InfSAAttention(8, 2, hops=hops, num_landmarks=5, log_n=log_n)
    layer.eval()
    layer.num_tokens_ref.fill_(100)
    layer.log_temperature.data.fill_(1.0)
    with torch.no_grad():
        result = quality.cosines(layer, q, k)
    tau = torch.tensor(1.0).exp().double()
    if log_n:
        tau = tau * torch.tensor(20).log() / torch.tensor(100).log()
    for head in range(2):
        a, b = q[head], k[head]
        exact = left_eigenvector((a @ b.mT).relu())

        norm = a.norm(dim=-1, keepdim=True)
        linear = (b @ (norm * a).sum(0)).relu()

        crelu_graph = crelu(a) @ crelu(b).mT

        landmarks = layer.landmarks[head].detach()
        phi_k = landmark_keys(b, landmarks, tau)
        chain = landmark_queries(a, landmarks, tau) @ (phi_k / phi_k.sum(0)).mT
        landmark = chain.sum(0)
        if hops == 'inf':
            gamma = layer.discount[head].double().detach()
            eye = torch.eye(20, dtype=torch.float64)
            landmark = torch.linalg.solve(eye - gamma * chain.mT, eye.sum(0))
        expected = [
            cosine(linear, exact),
            cosine(left_eigenvector(crelu_graph), exact),
            cosine(landmark, exact),
            cosine(torch.ones(20, dtype=torch.float64), exact),
        ]
        # The learnt temperature is float32.
        assert result[head].tolist() == pytest.approx(expected, abs=1e-6)


def test_nothing_to_compare(quality):
    """Dashes for a graph without a cycle, and without landmarks."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    k = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    layer = InfSAAttention(2, 1, variant='linear')
    assert quality.numbers(quality.cosines(layer, q, k)[0]) == ['-'] * 4
    *_, landmark, constant = quality.cosines(layer, q + 1, k + 1)[0]
    assert landmark.isnan() and constant > 0.9


def test_layers_of_a_model(tool, quality, project, weights):
    """Every layer and head, each from its own tokens of the picture."""
    config = project / 'tiny.py'
    picture = project / 'data' / 'image' / '0.png'
    header, rows = table(tool(TOOL, 'trained', config, weights, picture))
    assert header[:2] == ['layer', 'head']
    assert [row[:2] for row in rows] == [
        ['backbone.layers.0.attn.op', '0'],
        ['backbone.layers.0.attn.op', '1'],
        ['backbone.layers.1.attn.op', '0'],
        ['backbone.layers.1.attn.op', '1'],
        ['backbone.layers.0.attn.op', 'mean'],
        ['backbone.layers.1.attn.op', 'mean'],
        ['mean', ''],
        ['paper', ''],
    ]
    assert rows.pop()[2:] == ['0.985', '-', '-', '-']
    # A dash is in order: some graphs have no cycle, and so no eigenvector.
    cells = np.array(
        [[x.replace('-', 'nan') for x in row[2:]] for row in rows], float
    )
    for heads, mean in ((cells[:2], 4), (cells[2:4], 5), (cells[:4], 6)):
        np.testing.assert_allclose(
            np.nanmean(heads, 0), cells[mean], atol=1e-3, equal_nan=False
        )
    assert (cells[6] > 0).all() and (cells[6] <= 1).all()

    # The second layer once more, by way of the backbone's own steps.
    model = init_model(config, weights)
    image = read_image(picture).astype(np.float32)
    x = torch.from_numpy((image - 127.5) / 127.5).permute(2, 0, 1)[None]
    backbone = model.backbone
    with torch.no_grad():
        tokens = backbone.layers[0](backbone.embed(x))
        branch = backbone.layers[1].attn
        tokens = branch.norm(tokens).flatten(1, 2)
        q, k = branch.op.queries(tokens)[0], branch.op.keys(tokens)[0]
        expected = quality.cosines(branch.op, q, k)
    np.testing.assert_allclose(cells[2:4], expected, atol=6e-4)


def test_a_scene_and_no_landmarks(tool, project, tmp_path):
    config = tmp_path / 'scenes.py'
    config.write_text(f"""
_base_ = '{project / 'tiny.py'}'
model = dict(backbone=dict(attn_cfg=dict(variant='linear')))
test_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='SyntheticScenes',
        num_scenes=2,
        size=(48, 64),
        patch=4,
        pipeline=[dict(type='LoadSyntheticScene'), dict(type='PackSegInputs')],
    )
)
""")
    checkpoint = tmp_path / 'weights.pth'
    torch.save(init_model(config).state_dict(), checkpoint)
    _, rows = table(tool(TOOL, 'trained', config, checkpoint, 'scene:48x64'))
    assert len(rows) == 8
    assert {row[4] for row in rows} == {'-'}
    assert all(0 < float(row[2]) <= 1 for row in rows)
    # Scenes of another size, or number, are other pictures.
    for other in ('scene:48x64:1', 'scene:64'):
        assert rows != table(tool(TOOL, 'trained', config, checkpoint, other))

    no_attention = tmp_path / 'none.py'
    no_attention.write_text(
        f"_base_ = '{config}'\n"
        "model = dict(backbone=dict(attn_cfg=dict(variant='none')))\n"
    )
    outcome = tool(TOOL, 'trained', no_attention, checkpoint, 'scene:48x64')
    assert outcome.status == 1
    assert 'has no InfSAAttention to look at' in outcome.err.splitlines()[-1]


class Segmentor(nn.Module):
    """Stands for a model that hides every other token from its attention."""

    def __init__(self):
        super().__init__()
        self.attention = InfSAAttention(4, 2)

    def forward(self, x):
        valid = torch.ones(x.shape[:-1], dtype=torch.bool)
        valid[:, :, ::2] = False
        return self.attention(x, valid=valid)


def test_hidden_tokens_are_left_out(quality, monkeypatch):
    x = torch.randn(1, 3, 6, 4)
    monkeypatch.setattr(quality, 'run', lambda model, name: model(x))
    seen = quality.layer_inputs(Segmentor(), 'a.png')
    assert list(seen) == ['attention']
    torch.testing.assert_close(
        seen['attention'], x[:, :, 1::2].reshape(9, 4), rtol=0, atol=0
    )
    monkeypatch.setattr(quality, 'MAX_TOKENS', 8)
    with pytest.raises(ValueError, match=r'a\.png: makes 9 tokens, .* beyond'):
        quality.layer_inputs(Segmentor(), 'a.png')


def test_a_classifier_over_a_folder(tool, quality, project, tmp_path):
    """Means over its pictures, evenly spread."""
    config, weights = tmp_path / 'three.py', tmp_path / 'three.pth'
    write_classifier(config, weights)
    MMLogger._instance_dict.clear()
    folder = project / 'data' / 'image'
    files = quality.picture_files([str(folder)], 3)
    assert len(set(files)) == 3
    assert quality.picture_files([*files, str(folder)], 99) == [
        *files,
        *sorted(map(str, folder.iterdir())),
    ]
    _, together = table(
        tool(TOOL, 'trained', config, weights, folder, '--limit', 3)
    )
    each = [table(tool(TOOL, 'trained', config, weights, f))[1] for f in files]
    cells = [
        np.array([[float(x) for x in row[2:]] for row in rows[:4]])
        for rows in (together, *each)
    ]
    np.testing.assert_allclose(cells[0], np.mean(cells[1:], 0), atol=1.1e-3)
    (tmp_path / 'empty').mkdir()
    outcome = tool(TOOL, 'trained', config, weights, tmp_path / 'empty')
    assert outcome.status == 1
    assert 'empty: has no picture in it' in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('none.py weights.pth', 'none.py: no such config file'),
        ('tiny.py none.pth', 'none.pth: no such checkpoint file'),
        ('tiny.py weights.pth none.png', 'none.png: No such file'),
        ('tiny.py weights.pth tiny.py', 'tiny.py: not a picture'),
        ('tiny.py weights.pth scene:x', 'scene:x: write scene:SIZE'),
        ('tiny.py weights.pth', 'scene:256: the config tests on BaseSeg'),
        ('tiny.py weights.pth --cfg-options x.y=1', '--cfg-options x.y: the'),
    ],
)
def test_bad_input_is_one_line(
    tool, project, weights, tmp_path, monkeypatch, arguments, message
):
    (tmp_path / 'tiny.py').symlink_to(project / 'tiny.py')
    monkeypatch.chdir(tmp_path)
    outcome = tool(TOOL, 'trained', *arguments.split())
    assert outcome.status == 1
    assert 'Traceback' not in outcome.err
    assert not outcome.out.count('|')
    *_, line = outcome.err.splitlines()
    assert line.startswith(f'spectral_quality.py: error: {message}')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('', 'arguments are required: {random,trained}'),
        ('else', "invalid choice: 'else'"),
        ('random --tokens 0', "--tokens: '0' is no positive integer"),
        ('random --heads x', "--heads: 'x' is no positive integer"),
        ('trained tiny.py', 'arguments are required: checkpoint'),
    ],
)
def test_bad_usage(tool, arguments, message):
    outcome = tool(TOOL, *arguments.split())
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]
