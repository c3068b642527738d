# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Layers as other projects have them, where those are not installed.

The names of classes, attributes and arguments are theirs.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def attend(q, k, v, heads, scale=None, mask=None):
    """Softmax attention of (B, N, C), written out."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


class Attention(nn.Module):
    """timm.layers.Attention."""

    def __init__(self, dim, num_heads=4, qkv_bias=True, attn_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        x, _ = attend(q, k, v, self.num_heads, self.scale, attn_mask)
        return self.proj_drop(self.proj(self.norm(x)))


class MemEffAttention(nn.Module):
    """dinov2.layers.MemEffAttention."""

    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_bias=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        x, _ = attend(q, k, v, self.num_heads, self.scale)
        return self.proj_drop(self.proj(x))


class DividingAttention(nn.Module):
    """As many write it themselves."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** 0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attend(q, k, v, self.heads, 1 / self.scale)[0])


class LayerScale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        return x * self.weight


class MultiheadAttention(nn.Module):
    """mmpretrain.models.utils.MultiheadAttention."""

    def __init__(self, embed_dims, num_heads=4):
        super().__init__()
        self.input_dims = self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.v_shortcut = False
        self.head_dims = embed_dims // num_heads
        self.scale = self.head_dims**-0.5
        self.qkv = nn.Linear(embed_dims, embed_dims * 3)
        self.attn_drop = 0.0  # a number in its newer releases
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(0.0)
        self.out_drop = nn.Dropout(0.0)
        self.gamma1 = LayerScale(embed_dims)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x, _ = attend(q, k, v, self.num_heads, self.scale)
        return self.out_drop(self.gamma1(self.proj_drop(self.proj(x))))


class ViTSelfAttention(nn.Module):
    """transformers.models.vit.modeling_vit, as its newer releases."""

    def __init__(self, dim, heads=4, qkv_bias=True):
        super().__init__()
        self.num_attention_heads = heads
        self.attention_head_size = dim // heads
        self.all_head_size = dim
        self.dropout_prob = 0.1
        self.scaling = self.attention_head_size**-0.5
        self.is_causal = False
        self.query = nn.Linear(dim, dim, bias=qkv_bias)
        self.key = nn.Linear(dim, dim, bias=qkv_bias)
        self.value = nn.Linear(dim, dim, bias=qkv_bias)

    def forward(self, x, head_mask=None, output_attentions=False):
        return attend(
            self.query(x),
            self.key(x),
            self.value(x),
            self.num_attention_heads,
        )


class ViTSelfOutput(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.dense(hidden_states))


class ViTAttention(nn.Module):
    """A tensor in, a tensor out."""

    def __init__(self, dim, **kwargs):
        super().__init__()
        self.attention = ViTSelfAttention(dim, **kwargs)
        self.output = ViTSelfOutput(dim)

    def forward(self, hidden_states, head_mask=None):
        out, _ = self.attention(hidden_states, head_mask)
        return self.output(out, hidden_states)


class Dinov2Attention(ViTAttention):
    """As the older releases: a tuple out."""

    def __init__(self, dim, **kwargs):
        super().__init__(dim, **kwargs)
        self.attention.dropout = nn.Dropout(0.0)
        self.pruned_heads = set()

    def forward(self, hidden_states, head_mask=None, output_attentions=False):
        out, weights = self.attention(hidden_states, head_mask)
        out = self.output(out, hidden_states)
        return (out, weights) if output_attentions else (out,)


class SegformerEfficientSelfAttention(nn.Module):
    """transformers.models.segformer.modeling_segformer."""

    def __init__(self, dim, heads, sr_ratio):
        super().__init__()
        self.hidden_size = self.all_head_size = dim
        self.num_attention_heads = heads
        self.attention_head_size = dim // heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.0)
        self.sr_ratio = sr_ratio
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio)
            self.layer_norm = nn.LayerNorm(dim)

    def forward(self, x, height, width, output_attentions=False):
        keys = x
        if self.sr_ratio > 1:
            grid = x.mT.unflatten(-1, (height, width))
            keys = self.layer_norm(self.sr(grid).flatten(2).mT)
        return attend(
            self.query(x),
            self.key(keys),
            self.value(keys),
            self.num_attention_heads,
        )[:1]


class SegformerAttention(nn.Module):
    def __init__(self, dim, heads=4, sr_ratio=2):
        super().__init__()
        self.self = SegformerEfficientSelfAttention(dim, heads, sr_ratio)
        self.output = ViTSelfOutput(dim)
        self.pruned_heads = set()

    def forward(self, hidden_states, height, width, output_attentions=False):
        out = self.self(hidden_states, height, width, output_attentions)
        return (self.output(out[0], hidden_states), *out[1:])


class PyramidAttention(nn.Module):
    """Attention of PVT and of NVlabs' SegFormer."""

    def __init__(self, dim, num_heads=4, sr_ratio=2):
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, dim * 2, bias=False)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        self.sr_ratio = sr_ratio
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x, H, W):
        keys = x
        if self.sr_ratio > 1:
            grid = x.mT.unflatten(-1, (H, W))
            keys = self.norm(self.sr(grid).flatten(2).mT)
        k, v = self.kv(keys).chunk(2, -1)
        x, _ = attend(self.q(x), k, v, self.num_heads, self.scale)
        return self.proj_drop(self.proj(x))


class EncoderBlock(nn.Module):
    """torchvision.models.vision_transformer."""

    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(dim, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(
            dim, num_heads, batch_first=True
        )
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(2 * dim, dim),
            nn.Dropout(0.0),
        )

    def forward(self, input):
        x = self.ln_1(input)
        x, _ = self.self_attention(query=x, key=x, value=x, need_weights=False)
        x = self.dropout(x) + input
        return x + self.mlp(self.ln_2(x))


# What must be refused.


class RelPosAttention(Attention):
    """timm.models.vision_transformer_relpos."""

    def __init__(self, dim):
        super().__init__(dim)
        self.rel_pos = nn.Embedding(9, self.num_heads)

    def forward(self, x, shared_rel_pos=None):
        return super().forward(x, self.rel_pos.weight.mean())


class BeitAttention(ViTAttention):
    """The table lies one module deeper."""

    def __init__(self, dim):
        super().__init__(dim)
        self.attention.relative_position_bias = nn.Embedding(9, 4)


class LlamaAttention(nn.Module):
    """transformers.models.llama, without its causality."""

    def __init__(self, dim):
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 2
        self.num_key_value_groups = 2
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim // 2)
        self.v_proj = nn.Linear(dim, dim // 2)
        self.o_proj = nn.Linear(dim, dim)


class NewLlamaAttention(nn.Module):
    """The number of heads lies in the configuration."""

    class config:
        """As far as it matters."""

        num_attention_heads = 8
        num_key_value_heads = 2

    def __init__(self, dim):
        super().__init__()
        self.q_proj = nn.Linear(dim, dim)


class GPT2Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.num_heads = 4
        ones = torch.ones(8, 8, dtype=torch.bool)
        self.register_buffer('bias', ones.tril().view(1, 1, 8, 8))
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)


class MaskedAttention(Attention):
    """A mask of zeros and minus infinity as a buffer."""

    def __init__(self, dim):
        super().__init__(dim)
        mask = torch.full((8, 8), -torch.inf).triu(1)
        self.register_buffer('attn_mask', mask)


class MistralAttention(Attention):
    """Says of itself what it is, as transformers' layers do."""

    def __init__(self, dim):
        super().__init__(dim)
        self.is_causal = True


class DeepseekV2Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.num_heads = 4
        self.kv_lora_rank = 4
        self.kv_a_proj_with_mqa = nn.Linear(dim, 6)


class AttentionRope(Attention):
    """timm.layers.AttentionRope."""

    def forward(self, x, rope=None, attn_mask=None):
        return super().forward(x)


class CrossAttention(Attention):
    pass


# What looks right and is not.


class InterleavedAttention(Attention):
    """The heads packed outside of q, k and v."""

    def forward(self, x):
        packed = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1))
        q, k, v = (packed.select(-2, i).flatten(2) for i in range(3))
        return self.proj(attend(q, k, v, self.num_heads)[0])


class SecretAttention(Attention):
    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(x.transpose(1, 2).flatten(2))


class LocalAttention(Attention):
    """Another scale than it says, and only a little."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scale = 1.001 / math.sqrt(self.head_dim)
        return self.proj(attend(q, k, v, self.num_heads, scale)[0])


class TalkativeAttention(ViTAttention):
    """Weights come along whether asked for or not."""

    def forward(self, hidden_states, output_attentions=False):
        out, weights = self.attention(hidden_states)
        return self.output(out, hidden_states), weights


class PooledAttention(Attention):
    """One token for all."""

    def forward(self, x):
        return super().forward(x).mean(1)


class NestAttention(Attention):
    """timm.models.nest, which takes (B, T, N, C)."""

    def forward(self, x):
        _, blocks, _, _ = x.shape
        return super().forward(x.flatten(0, 1)).unflatten(0, (-1, blocks))
