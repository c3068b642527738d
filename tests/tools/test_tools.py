# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
import torch
from PIL import Image

from infsa_seg.apis import init_model
from infsa_seg.datasets import SyntheticScenes


def read(path):
    with Image.open(path) as picture:
        return picture.mode, np.array(picture)


def miou(outcome):
    return float(re.findall(r'mIoU: ([\d.]+)', outcome.out)[-1])


def test_train_then_resume(tool, project, tmp_path):
    config = project / 'tiny.py'
    first = tool('train.py', config, '--work-dir', tmp_path)
    assert first.status == 0
    # A constant prediction gets half of the larger class: below 40.
    assert miou(first) > 75
    resumed = tool(
        'train.py',
        config,
        '--work-dir',
        tmp_path,
        '--resume',
        '--cfg-options',
        'train_cfg.max_iters=32',
    )
    assert resumed.status == 0
    assert 'resumed epoch: 0, iter: 30' in resumed.out
    assert 'Iter(train) [ 5/32]' not in resumed.out
    assert (tmp_path / 'iter_32.pth').is_file()


def test_resume_from_a_given_checkpoint(tool, project, trained, tmp_path):
    outcome = tool(
        'train.py',
        project / 'tiny.py',
        '--work-dir',
        tmp_path,
        '--resume',
        trained / 'iter_30.pth',
        '--cfg-options',
        'train_cfg.max_iters=31',
    )
    assert outcome.status == 0
    assert 'resumed epoch: 0, iter: 30' in outcome.out
    assert (tmp_path / 'iter_31.pth').is_file()


def test_resume_with_nothing_to_resume_keeps_load_from(
    tool, project, trained, tmp_path
):
    outcome = tool(
        'train.py',
        project / 'tiny.py',
        '--work-dir',
        tmp_path,
        '--resume',
        '--cfg-options',
        f'load_from={trained / "iter_30.pth"}',
        'train_cfg.max_iters=1',
        'train_cfg.val_interval=1',
    )
    assert outcome.status == 0
    assert f'{tmp_path}: no checkpoint, training starts anew' in outcome.out
    assert miou(outcome) > 75


def test_test_and_infer_agree(tool, project, trained, tmp_path):
    config, checkpoint = project / 'tiny.py', trained / 'iter_30.pth'
    tested = tool(
        'test.py',
        config,
        checkpoint,
        '--work-dir',
        tmp_path / 'work',
        '--out',
        tmp_path / 'out',
        '--show-dir',
        tmp_path / 'show',
    )
    assert tested.status == 0
    assert miou(tested) > 75
    assert len(list((tmp_path / 'work').glob('*/*.json'))) == 1

    images = sorted((project / 'data' / 'image').iterdir())
    inferred = tool(
        'infer.py',
        config,
        checkpoint,
        *images,
        '--labels',
        project / 'data' / 'label',
        '--out',
        tmp_path / 'infer',
    )
    assert inferred.status == 0
    assert miou(inferred) == miou(tested)
    pictures = list((tmp_path / 'show').rglob('*.png'))
    assert len(pictures) == len(images)
    for image in images:
        mode, mask = read(tmp_path / 'infer' / f'{image.stem}_mask.png')
        assert mode == 'P'
        _, expected = read(tmp_path / 'out' / image.name)
        np.testing.assert_array_equal(mask, expected)
    assert str(tmp_path / 'infer' / '0_overlay.png') in inferred.out


def test_augmented(tool, project, trained, tmp_path):
    """Of two mirror images, each pixel gets the mean of both."""
    config = tmp_path / 'tta.py'
    config.write_text(f"""
_base_ = '{project / 'tiny.py'}'
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)],
            [dict(type='LoadAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
""")
    outcome = tool(
        'test.py',
        config,
        trained / 'iter_30.pth',
        '--tta',
        '--work-dir',
        tmp_path,
    )
    assert outcome.status == 0
    assert miou(outcome) > 75


def test_infer_tries_every_input(tool, project, trained, tmp_path):
    image = project / 'data' / 'image' / '0.png'
    broken, missing = tmp_path / 'broken.png', tmp_path / 'missing.png'
    broken.write_bytes(image.read_bytes()[:99])
    same_name = tmp_path / '0.png'
    same_name.symlink_to(image)
    outcome = tool(
        'infer.py',
        project / 'tiny.py',
        trained / 'iter_30.pth',
        missing,
        broken,
        'scene:64',
        tmp_path,
        image,
        same_name,
        '--out',
        tmp_path / 'out',
    )
    assert outcome.status == 1
    failed = [line for line in outcome.err.splitlines() if 'failed' in line]
    for line, reason in zip(
        failed,
        [
            f'{missing}: No such file or directory',
            f'{broken}: not a picture that OpenCV can read',
            'scene:64: the config tests on BaseSegDataset',
            f'{tmp_path}: Is a directory',
            f'{same_name}: {tmp_path}/out/0_mask.png is the result of another',
        ],
        strict=True,
    ):
        assert line.startswith(f'infer.py: failed: {reason}')
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
        '0_mask.png',
        '0_overlay.png',
    ]


def test_labels_that_do_not_fit(tool, project, trained, tmp_path):
    images = sorted((project / 'data' / 'image').iterdir())[:2]
    labels = tmp_path / 'labels'
    labels.mkdir()
    Image.new('RGB', (48, 32)).save(labels / images[0].name)
    outcome = tool(
        'infer.py',
        project / 'tiny.py',
        trained / 'iter_30.pth',
        *images,
        '--labels',
        labels,
        '--out',
        tmp_path / 'out',
    )
    assert outcome.status == 1
    first, second = outcome.err.splitlines()[-2:]
    assert 'shape (32, 48, 3) for an image of (32, 48); one class' in first
    assert f'{labels / images[1].name}: No such file' in second
    assert 'mIoU' not in outcome.out


def test_scenes_have_no_files(tool, project, tmp_path):
    config = tmp_path / 'scenes.py'
    classes = len(SyntheticScenes.METAINFO['classes'])
    config.write_text(f"""
_base_ = '{project / 'tiny.py'}'
model = dict(decode_head=dict(num_classes={classes}))
test_pipeline = [
    dict(type='LoadSyntheticScene'),
    dict(type='PackSegInputs'),
]
test_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='SyntheticScenes',
        num_scenes=2,
        size=(48, 64),
        patch=4,
        seed=5,
        pipeline=test_pipeline,
    )
)
""")
    checkpoint = tmp_path / 'weights.pth'
    torch.save(init_model(config).state_dict(), checkpoint)
    tested = tool(
        'test.py',
        config,
        checkpoint,
        '--work-dir',
        tmp_path,
        '--out',
        tmp_path / 'out',
        '--show-dir',
        tmp_path / 'show',
    )
    assert tested.status == 0
    assert len(list((tmp_path / 'show').rglob('*.png'))) == 2

    scenes = ['scene:48x64', 'scene:48x64:1']
    inferred = tool(
        'infer.py', config, checkpoint, *scenes, '--out', tmp_path / 'infer'
    )
    assert inferred.status == 0
    assert miou(inferred) == miou(tested)
    for index in range(2):
        name = f'scene-48x64-{index}_mask.png'
        _, mask = read(tmp_path / 'infer' / name)
        (tested_as,) = (tmp_path / 'out').glob(f'*{index}.png')
        np.testing.assert_array_equal(mask, read(tested_as)[1])

    outcome = tool(
        'infer.py', config, checkpoint, 'scene:x', '--out', tmp_path / 'infer'
    )
    assert outcome.status == 1
    assert 'failed: scene:x: write scene:SIZE' in outcome.err


class Foreign:
    """Stands for a class of another package."""


BAD_INPUT = {
    'no config': ('train.py none.py', 'none.py: no such config file'),
    'directory as config': ('train.py .', '.: no such config file'),
    'text as config': ('train.py text.py', 'text.py: SyntaxError: '),
    'name not defined': (
        'train.py name.py',
        "name.py: NameError: name 'undefined' is not defined",
    ),
    'base not there': ('train.py base.py', 'base.py: FileNotFoundError: '),
    'import fails': (
        'train.py import.py',
        'import.py: ImportError: Failed to import no_such_module',
    ),
    'config of another package': (
        'train.py mmseg::x.py',
        'mmseg::x.py: only configs of infsa_seg go by a package name',
    ),
    'config of ours that is not': (
        'train.py infsa_seg::x.py',
        'infsa_seg::x.py: no such config file',
    ),
    'checkpoint not there': (
        'test.py tiny.py none.pth',
        'none.pth: no such checkpoint file',
    ),
    'checkpoint to resume not there': (
        'train.py tiny.py --resume none.pth',
        'none.pth: no such checkpoint file',
    ),
    'foreign pickle': (
        'test.py tiny.py foreign.pth',
        'foreign.pth: refused, it holds a ',
    ),
    'foreign pickle to infer with': (
        'infer.py tiny.py foreign.pth 0.png --out out',
        'foreign.pth: refused, it holds a ',
    ),
    'no checkpoint at all': (
        'test.py tiny.py text.py',
        'text.py: not a checkpoint',
    ),
    'weights of another model': (
        'test.py tiny.py other.pth',
        'other.pth: nothing in it fits the model',
    ),
    'weights of another model to start from': (
        'train.py tiny.py --cfg-options load_from=other.pth',
        'other.pth: nothing in it fits the model',
    ),
    'weights of another model to infer with': (
        'infer.py tiny.py other.pth 0.png --out out',
        'other.pth: nothing in it fits EncoderDecoder',
    ),
    'large: what cannot run in bands': (
        'infer_large.py tiny.py iter_30.pth 0.png --out out --cfg-options '
        'model.backbone.attn_cfg.variant=softmax',
        'backbone.layers.0.attn.op (SoftmaxAttention) is neither local nor a '
        'sum over tokens',
    ),
    'large: no amount of memory': (
        'infer_large.py tiny.py iter_30.pth 0.png --out out --max-memory lots',
        "'lots' is no amount of memory",
    ),
    'large: no height of a band': (
        'infer_large.py tiny.py iter_30.pth 0.png --out out --band-rows 0',
        'band_rows=0: give 1 or more',
    ),
    'large: one file for several inputs': (
        'infer_large.py tiny.py iter_30.pth 0.png 1.png --out out.tif',
        'out.tif: is one file for 2 inputs; give a directory',
    ),
    'large: a pattern without files': (
        'infer_large.py tiny.py iter_30.pth *.svs --out out',
        '*.svs: matches no file',
    ),
    'large: foreign pickle': (
        'infer_large.py tiny.py foreign.pth 0.png --out out',
        'foreign.pth: refused, it holds a ',
    ),
    'no data': (
        'train.py tiny.py --cfg-options '
        'train_dataloader.dataset.data_root=nowhere',
        'nowhere/image: No such file or directory',
    ),
    'option for nothing': (
        'train.py tiny.py --cfg-options optim_wraper.optimizer.lr=1',
        '--cfg-options optim_wraper.optimizer.lr: the config has no '
        "'optim_wraper'; did you mean optim_wrapper?",
    ),
    'option into a number': (
        'train.py tiny.py --cfg-options train_cfg.max_iters.x=1',
        '--cfg-options do not fit ',
    ),
    'unknown type': (
        'train.py tiny.py --cfg-options model.backbone.type=InfVit',
        'InfVit is not in the mmseg::model registry',
    ),
    'unknown argument': (
        'train.py tiny.py --cfg-options model.backbone.patch=8',
        "InfViT.__init__() got an unexpected keyword argument 'patch'",
    ),
    'augmentation not configured': (
        'test.py tiny.py iter_30.pth --tta',
        '--tta: the config has no tta_pipeline',
    ),
    'masks without a metric': (
        'test.py tiny.py iter_30.pth --out out '
        '--cfg-options test_evaluator.type=DepthMetric',
        '--out: test_evaluator has no IoUMetric',
    ),
    'pictures without a hook': (
        'test.py tiny.py iter_30.pth --show-dir out '
        '--cfg-options default_hooks.visualization=None',
        '--show: the config has no default_hooks.visualization',
    ),
}
BAD_USAGE = {
    'train.py': 'the following arguments are required: config',
    'test.py tiny.py': 'the following arguments are required: checkpoint',
    'infer.py tiny.py x.pth x.png': 'arguments are required: --out',
    'infer_large.py tiny.py x.pth x.png': 'arguments are required: --out',
    'infer_large.py tiny.py x.pth x.png --out o --palette red': (
        "'red' is no list of colours such as ff0000,00ff00"
    ),
    'infer_large.py tiny.py x.pth x.png --out o --channels red': (
        "'red' is no list of channels such as 4,3,2"
    ),
    'infer_large.py tiny.py x.pth x.png --out o --store tape': (
        "--store: invalid choice: 'tape'"
    ),
    'train.py tiny.py --cfg-options lr': "'lr' is not key=value",
    'train.py tiny.py --launcher x': "--launcher: invalid choice: 'x'",
}


@pytest.fixture
def desk(project, trained, tmp_path, monkeypatch):
    """A working directory with the files that the tables above name."""
    files = {
        'text.py': 'this is no config',
        'name.py': 'model = undefined',
        'base.py': "_base_ = './nowhere.py'",
        'import.py': "custom_imports = dict(imports=['no_such_module'])",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for path in (project / 'tiny.py', trained / 'iter_30.pth'):
        (tmp_path / path.name).symlink_to(path)
    torch.save({'x': Foreign()}, tmp_path / 'foreign.pth')
    torch.save({'layer1.weight': torch.ones(1)}, tmp_path / 'other.pth')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize('case', BAD_INPUT)
def test_bad_input_is_one_line(tool, desk, case):
    arguments, message = BAD_INPUT[case]
    name, *args = arguments.split()
    outcome = tool(name, *args)
    assert outcome.status == 1
    assert 'Traceback' not in outcome.err
    *_, line = outcome.err.splitlines()
    assert line.startswith(f'{name}: error: {message}')
    assert not (desk / 'out').exists()


@pytest.mark.parametrize('arguments', BAD_USAGE)
def test_bad_usage(tool, desk, arguments):
    name, *args = arguments.split()
    outcome = tool(name, *args)
    assert outcome.status == 2
    assert BAD_USAGE[arguments] in outcome.err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU is there')
@pytest.mark.parametrize('arguments', ['--amp', '--launcher pytorch'])
def test_needs_a_gpu(tool, desk, arguments):
    outcome = tool('train.py', 'tiny.py', *arguments.split())
    assert outcome.status == 1
    line = outcome.err.splitlines()[-1]
    assert line.startswith(f'train.py: error: {arguments}: ')
    assert line.endswith('none was found')


@pytest.mark.parametrize(
    'name', ['train.py', 'test.py', 'infer.py', 'infer_large.py']
)
def test_help(tool, name):
    outcome = tool(name, '--help')
    assert outcome.status == 0
    assert '--cfg-options' in outcome.out
    # `mim train` looks for it, and would pass it.
    assert '--gpus' not in outcome.out
