# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Small networks, and the plain forward pass that executors must equal."""

import torch
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from torch import nn
from torch.nn import functional as F

from infsa_seg.execution.bands import any_valid

PATCH = 8
ATTENTIONS = {
    'linear': dict(variant='linear'),
    'neumann': dict(variant='neumann'),
    'neumann-inf': dict(variant='neumann', hops='inf'),
    'crelu': dict(variant='neumann', graph='crelu'),
    'row-inf': dict(variant='neumann', graph='crelu', norm='row', hops='inf'),
    'none': dict(variant='none'),
    'softmax': dict(variant='softmax'),
    'pure': dict(variant='pure'),
}


# Those that bands can add up, or that need none.
VARIANTS = [name for name in ATTENTIONS if name not in ('softmax', 'pure')]


def segmentor(
    attention='neumann',
    ffn='dwconv',
    num_upsamples=1,
    kind='EncoderDecoder',
    head=None,
    test_cfg=None,
    patch_size=PATCH,
    **kwargs,
):
    """In evaluation mode; weights that let every token matter."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(
            dict(
                type=kind,
                data_preprocessor=dict(
                    type='SegDataPreProcessor',
                    mean=[120.0, 110.0, 100.0],
                    std=[60.0, 50.0, 40.0],
                    bgr_to_rgb=True,
                ),
                backbone=dict(
                    type='InfViT',
                    arch=dict(embed_dims=24, num_layers=3, num_heads=3),
                    img_size=32,
                    patch_size=patch_size,
                    out_indices=(0, 2),
                    final_norm=True,
                    attn_cfg=dict(ATTENTIONS[attention]),
                    ffn=ffn,
                ),
                decode_head=head
                or dict(
                    type='BandSegHead',
                    in_channels=[24, 24],
                    in_index=[0, 1],
                    channels=16,
                    num_classes=5,
                    num_upsamples=num_upsamples,
                ),
                train_cfg=dict(),
                test_cfg=ConfigDict(test_cfg or dict(mode='whole')),
                **kwargs,
            )
        )
    return _enliven(model)


def classifier(attention='neumann', ffn='dwconv', pool='mean'):
    """The same with one vector of logits for an image."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(
            dict(
                type='InfViTClassifier',
                backbone=dict(
                    type='InfViT',
                    arch=dict(embed_dims=24, num_layers=3, num_heads=3),
                    img_size=32,
                    patch_size=PATCH,
                    final_norm=True,
                    attn_cfg=dict(ATTENTIONS[attention]),
                    ffn=ffn,
                ),
                num_classes=7,
                pool=pool,
            )
        )
    return _enliven(model)


def _enliven(model):
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and 'landmarks' not in name:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        elif name.endswith('bias'):
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def forward(model, pixels, valid=None):
    """Logits of the plain forward pass, (classes, height, width).

    Args:
        model: of :func:`segmentor`.
        pixels: (1, 3, height, width).
        valid: bool (height, width), or None.
    """
    height, width = pixels.shape[2:]
    padded, mask = pad(pixels, valid, model.backbone.patch_size)
    with torch.no_grad():
        taps = model.backbone(padded, valid=mask)
        logits = model.decode_head(taps, valid=mask)
        logits = F.interpolate(logits, size=padded.shape[2:], mode='bilinear')
    return logits[0, :, :height, :width]


def pad(pixels, valid, patch):
    """Pixels up to whole tokens, and the mask of these, or None."""
    height, width = pixels.shape[2:]
    mask = None
    if valid is not None:
        pixels = pixels.masked_fill(~valid, 0)
        mask = any_valid(valid, patch)[None]
    return F.pad(pixels, (0, -width % patch, 0, -height % patch)), mask
