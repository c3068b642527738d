# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Vision Transformers whose weights are named as other packages name them."""

import torch
from mmcv.cnn.bricks.transformer import FFN
from torch import nn

from infsa_seg.layers import InfSAAttention
from tests.layers import foreign_layers as foreign

WIDTH, HEADS, SIDE, LAYERS = 16, 4, 4, 2
GRID = (3, 5)
SIZE = (12, 20)
NUMBER = 15


def norm(eps=1e-6):
    return nn.LayerNorm(WIDTH, eps=eps)


def token(count=1):
    return nn.Parameter(torch.randn(1, count, WIDTH))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 40)
        self.fc2 = nn.Linear(40, WIDTH)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH) - 0.5)

    def forward(self, x):
        return x * self.gamma


class Branches(nn.Module):
    """What all layers do, by the names that each gives its parts."""

    def run(self, x, norm1, attn, norm2, mlp):
        x = x + attn(norm1(x))
        return x + mlp(norm2(x))


class TimmBlock(Branches):
    """timm, DeiT and DINOv2."""

    def __init__(self, attention=foreign.Attention, scaled=False):
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.attn, self.mlp = attention(WIDTH, HEADS), Mlp()
        self.ls1, self.ls2 = (
            Scale() if scaled else nn.Identity() for _ in range(2)
        )

    def forward(self, x):
        return self.run(
            x,
            self.norm1,
            lambda y: self.ls1(self.attn(y)),
            self.norm2,
            lambda y: self.ls2(self.mlp(y)),
        )


class PretrainBlock(Branches):
    """mmpretrain."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = norm(), norm()
        self.attn = foreign.MultiheadAttention(WIDTH, HEADS)
        self.ffn = FFN(
            WIDTH, 40, act_cfg=dict(type='GELU'), layer_scale_init_value=0.3
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return self.ffn(self.ln2(x), identity=x)


class HuggingFaceBlock(Branches):
    """transformers' ViTLayer."""

    def __init__(self):
        super().__init__()
        self.attention = foreign.ViTAttention(WIDTH, heads=HEADS)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense = nn.Linear(WIDTH, 40)
        self.output.dense = nn.Linear(40, WIDTH)
        self.layernorm_before, self.layernorm_after = norm(), norm()

    def forward(self, x):
        return self.run(
            x,
            self.layernorm_before,
            self.attention,
            self.layernorm_after,
            lambda y: self.output.dense(
                nn.functional.gelu(self.intermediate.dense(y))
            ),
        )


class InfsaBlock(Branches):
    """The reference package's example."""

    def __init__(self):
        super().__init__()
        self.attn = InfSAAttention(WIDTH, HEADS, variant='pure', discount=0.7)
        self.norm1, self.norm2 = norm(), norm()
        self.ff = nn.Sequential(
            nn.Linear(WIDTH, 40),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(40, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return self.run(x, self.norm1, self.attn, self.norm2, self.ff)


class Source(nn.Module):
    """A transformer; `run` leaves out the tokens that are no patches."""

    def run(self, patches, position, layers, last, image):
        x = patches(image).flatten(2).mT
        x = x + position[:, -NUMBER:]
        for layer in layers:
            x = layer(x)
        return last(x).mT.unflatten(-1, GRID)


def stem():
    return nn.Conv2d(3, WIDTH, SIDE, stride=SIDE)


class Timm(Source):
    def __init__(self, tokens=('cls_token',), chunks=False, **kwargs):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = stem()
        for name in tokens:
            self.register_parameter(name, token())
        self.pos_embed = token(NUMBER + len(tokens))
        blocks = [TimmBlock(**kwargs) for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(
            [nn.ModuleList([blocks[0]]), nn.ModuleList([None, blocks[1]])]
            if chunks
            else blocks
        )
        self.chunks = chunks
        self.norm = norm()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, image):
        blocks = self.blocks
        if self.chunks:
            blocks = [blocks[0][0], blocks[1][1]]
        return self.run(
            self.patch_embed.proj, self.pos_embed, blocks, self.norm, image
        )


class Dinov2(Timm):
    def __init__(self, chunks=False):
        super().__init__(
            chunks=chunks, attention=foreign.MemEffAttention, scaled=True
        )
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))


class Torchvision(Source):
    def __init__(self):
        super().__init__()
        self.conv_proj = stem()
        self.class_token = token()
        self.encoder = nn.Module()
        self.encoder.pos_embedding = token(NUMBER + 1)
        self.encoder.layers = nn.Sequential()
        for i in range(LAYERS):
            self.encoder.layers.add_module(
                f'encoder_layer_{i}', foreign.EncoderBlock(WIDTH, HEADS)
            )
        self.encoder.ln = norm()
        self.heads = nn.Sequential(nn.Linear(WIDTH, 7))

    def forward(self, image):
        encoder = self.encoder
        return self.run(
            self.conv_proj,
            encoder.pos_embedding,
            encoder.layers,
            encoder.ln,
            image,
        )


class Pretrain(Source):
    def __init__(self):
        super().__init__()
        self.cls_token = token()
        self.pos_embed = token(NUMBER + 1)
        self.patch_embed = nn.Module()
        self.patch_embed.projection = stem()
        self.layers = nn.ModuleList([PretrainBlock() for _ in range(LAYERS)])
        self.ln1 = norm()

    def forward(self, image):
        return self.run(
            self.patch_embed.projection,
            self.pos_embed,
            self.layers,
            self.ln1,
            image,
        )


class HuggingFace(Source):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Module()
        self.embeddings.cls_token = token()
        self.embeddings.position_embeddings = token(NUMBER + 1)
        self.embeddings.patch_embeddings = nn.Module()
        self.embeddings.patch_embeddings.projection = stem()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(
            [HuggingFaceBlock() for _ in range(LAYERS)]
        )
        self.layernorm = norm()

    def forward(self, image):
        return self.run(
            self.embeddings.patch_embeddings.projection,
            self.embeddings.position_embeddings,
            self.encoder.layer,
            self.layernorm,
            image,
        )


class Infsa(Source):
    def __init__(self):
        super().__init__()
        self.patch_embed = stem()
        self.cls_token = token()
        self.pos_embed = token(NUMBER + 1)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            [InfsaBlock() for _ in range(LAYERS)]
        )
        self.encoder.norm = norm()
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, image):
        return self.run(
            self.patch_embed,
            self.pos_embed,
            self.encoder.layers,
            self.encoder.norm,
            image,
        )

    def state_dict(self):
        """Theirs has one scalar for all heads."""
        return {
            name.replace('discount_logit', 'rho_logit'): (
                value[0].clone() if 'discount_logit' in name else value
            )
            for name, value in super().state_dict().items()
        }


SOURCES = {
    'timm': Timm,
    'timm without class token': lambda: Timm(tokens=()),
    'timm with layer scale': lambda: Timm(scaled=True),
    'DeiT, distilled': lambda: Timm(tokens=('cls_token', 'dist_token')),
    'DINOv2': Dinov2,
    'DINOv2 in chunks': lambda: Dinov2(chunks=True),
    'torchvision': Torchvision,
    'mmpretrain': Pretrain,
    'transformers': HuggingFace,
    'infsa': Infsa,
}


def make(kind):
    """A source in which nothing is zero or one."""
    torch.manual_seed(0)
    source = SOURCES[kind]().eval()
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            each = 'discount' not in name
            noise = torch.randn_like(parameter if each else parameter[:1])
            parameter.add_(noise * 0.2)
    return source
