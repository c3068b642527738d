# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Every config that pretrains: what it is, and one step on no memory."""

from itertools import product
from pathlib import Path

import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.structures import BaseDataElement
from mmseg.registry import DATA_SAMPLERS, MODELS, TRANSFORMS

from infsa_seg.apis import load_config

FOLDER = Path(__file__).parents[1] / 'configs' / 'pretrain'
ARCHS = ('tiny', 'small', 'base', 'l4')
VARIANTS = ('neumann', 'linear', 'pure', 'softmax')
IN1K = [f'infvit-{a}_{v}_in1k' for a, v in product(ARCHS, VARIANTS)]
TINY = [f'infvit-4x128_{v}_tiny-imagenet-50' for v in VARIANTS]


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


def read(name):
    return load_config(FOLDER / f'{name}.py')


def step(model, inputs):
    """Loss and gradients of two pictures, on the device of the inputs."""
    data = [BaseDataElement() for _ in inputs]
    for label, sample in enumerate(data):
        sample.gt_label = label
    loss = model.train()(inputs, data, mode='loss')['loss']
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    return loss


def test_the_promised_configs_are_there():
    assert {path.stem for path in FOLDER.glob('*.py')} == {*IN1K, *TINY}


@pytest.mark.parametrize('name', [*IN1K, *TINY])
def test_builds_and_steps(name, monkeypatch, tmp_path):
    """On the meta device: of the right shapes, whatever the size."""
    monkeypatch.chdir(tmp_path)
    cfg = read(name)
    _, variant, data = name.split('_')
    assert cfg.model.backbone.attn_cfg.variant == variant
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    size = cfg.model.backbone.img_size
    loss = step(model, torch.empty(2, 3, size, size, device='meta'))
    assert loss.shape == ()
    classes = 1000 if data == 'in1k' else 50
    assert model.head.out_features == classes
    assert cfg.model.data_preprocessor.num_classes == classes


@pytest.mark.parametrize('variant', VARIANTS)
def test_steps_in_numbers(variant):
    cfg = read(f'infvit-4x128_{variant}_tiny-imagenet-50')
    model = MODELS.build(cfg.model)
    model.init_weights()
    loss = step(model, torch.randn(2, 3, 64, 64))
    # What guessing costs.
    assert abs(loss.item() - torch.tensor(50.0).log().item()) < 1


@pytest.mark.parametrize(
    ('arch', 'millions'),
    [('tiny', 5.8), ('small', 22.3), ('base', 87.1), ('l4', 52.6)],
)
def test_sizes(arch, millions):
    with torch.device('meta'):
        model = MODELS.build(read(f'infvit-{arch}_softmax_in1k').model)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize('names', [IN1K[:4], IN1K[4:8], IN1K[8:12], TINY])
def test_one_recipe_for_all_operators(names):
    settings = []
    for name in names:
        cfg = read(name).to_dict()
        del cfg['model']['backbone']['attn_cfg']['variant']
        settings.append(cfg)
    assert all(other == settings[0] for other in settings[1:])


def test_the_recipe():
    """DeiT's, as docs/pretraining.md has it."""
    cfg = load_config(FOLDER / 'infvit-small_linear_in1k.py')
    warm_up, cosine = cfg.param_scheduler
    assert warm_up.end == cosine.begin == 5
    assert cosine.end == cfg.train_cfg.max_epochs == 300
    assert cfg.optim_wrapper.optimizer.lr == 5e-4 * 1024 / 512
    assert cfg.auto_scale_lr.base_batch_size == 1024
    augments = [a.type for a in cfg.model.data_preprocessor.batch_augments]
    assert augments == ['BatchRandomErasing', 'MixUpCutMix']
    assert cfg.custom_hooks[0].momentum == 4e-5
    sampler = DATA_SAMPLERS.build(
        cfg.train_dataloader.sampler | {'dataset': range(9), 'seed': 0}
    )
    assert sampler.num_repeats == 3


def test_the_pictures_that_are_tested():
    """The short side to 256, the middle of 224, nothing random."""
    cfg = load_config(FOLDER / 'infvit-tiny_linear_in1k.py')
    _, resize, crop, pack = map(
        TRANSFORMS.build, cfg.val_dataloader.dataset.pipeline
    )
    image = torch.arange(512 * 1000, dtype=torch.int32).reshape(512, 1000)
    image = image.remainder(256).to(torch.uint8)[..., None].expand(-1, -1, 3)
    resized = resize(dict(img=image.numpy().copy()))
    assert resized['img'].shape == (256, 500, 3)
    middle = resized['img'][16:240, 138:362].copy()
    cropped = crop(resized)['img']
    assert (cropped == middle).all()
    assert pack(dict(img=cropped))['inputs'].shape == (3, 224, 224)
    assert cfg.val_dataloader.dataset.test_mode
    assert cfg.test_dataloader == cfg.val_dataloader


def test_one_augmented_step():
    cfg = load_config(FOLDER / 'infvit-tiny_linear_in1k.py')
    model = MODELS.build(cfg.model)
    _, crop, flip, augment, pack = map(
        TRANSFORMS.build, cfg.train_dataloader.dataset.pipeline
    )
    picture = torch.randint(0, 255, (40, 50, 3), dtype=torch.uint8).numpy()
    crop.scale = (32, 32)
    batch = [
        pack(augment(flip(crop(dict(img=picture.copy(), gt_label=label)))))
        for label in (3, 999)
    ]
    data = {key: [item[key] for item in batch] for key in batch[0]}
    data = model.data_preprocessor(data, training=True)
    assert data['inputs'].shape == (2, 3, 32, 32)
    for sample in data['data_samples']:
        assert torch.count_nonzero(sample.gt_score) <= 2
        assert sample.gt_score[[3, 999]].sum() == pytest.approx(1)
    model(**data, mode='loss')['loss'].backward()


@pytest.mark.parametrize('variant', ['neumann', 'linear'])
def test_a_segmentor_for_the_small_backbone(variant):
    """Of the same form and normalisation, so that its weights fit."""
    classifier = read(f'infvit-4x128_{variant}_tiny-imagenet-50').model
    path = FOLDER.parent / 'infvit'
    segmentor = load_config(
        path / f'infvit-4x128_{variant}_camvid-192x192.py'
    ).model
    for name in ('mean', 'std', 'bgr_to_rgb'):
        assert (
            segmentor.data_preprocessor[name]
            == classifier.data_preprocessor[name]
        )
    mine, other = segmentor.backbone, classifier.backbone
    assert {k for k in {**mine, **other} if mine.get(k) != other.get(k)} == {
        *('img_size', 'out_indices')
    }
