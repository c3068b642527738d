# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The InfViT backbone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infsa_seg.layers import (
    FFN,
    Block,
    GlobalBranch,
    InfSAAttention,
    LocalBranch,
    PatchEmbed,
    PositionEmbedding,
    identity,
    zero_rows,
)
from infsa_seg.layers.protocol import Halo, Merge, count_context

from ..utils import load_pretrained


@MODELS.register_module()
class InfViT(BaseModule):
    """Vision Transformer with Infinite Self-Attention (DESIGN section 4).

    Patch embedding, learned positions, then blocks
    ``[x + attn(LN x); x + FFN(LN x)]``. The arguments follow mmsegmentation's
    ``VisionTransformer`` where both have them. Any image size may follow
    after construction; sides that are not multiples of the patch are padded
    at the right and the bottom.

    Args:
        arch (str | dict): 'tiny', 'small', 'base', 'l4', 'large', or a dict
            with ``embed_dims``, ``num_layers`` and ``num_heads``.
            Defaults to 'tiny'.
        img_size (int | tuple[int]): Height and width in pixels for which the
            grid of positions is learned. Defaults to 224.
        patch_size (int): Side of a patch in pixels. Defaults to 16.
        in_channels (int): Spectral channels of the image. Defaults to 3.
        embed_dims, num_layers, num_heads (int, optional): Override ``arch``.
        mlp_ratio (float): Hidden width of the FFN over ``embed_dims``.
            Defaults to 4.
        out_indices (int | Sequence[int]): Layers whose outputs are returned,
            negative ones counted from the end. Defaults to -1.
        qkv_bias (bool): Bias of the query, key and value projections.
            Defaults to True.
        drop_rate (float): Dropout after the positions and in the FFN.
            Defaults to 0.
        drop_path_rate (float): Stochastic depth of the last layer; it grows
            linearly from 0. Defaults to 0.
        norm_cfg (dict): Normalisation. Defaults to LN with eps 1e-6.
        final_norm (bool): Normalise the output of the last layer.
            Defaults to False.
        attn_cfg (dict, optional): ``variant`` and its options, see
            :class:`infsa_seg.layers.InfSAAttention`; variant 'none' leaves
            attention out, for comparison. Defaults to 'neumann'.
        ffn (str): 'mlp', or 'dwconv' with a depthwise 3x3 inside.
            Defaults to 'mlp'.
        with_cp (bool): Recompute each layer in the backward pass to save
            memory. Defaults to False.
        frozen_stages (int): Freeze the embedding (0) and the first so many
            layers. Defaults to -1, nothing.
        init_cfg (dict, optional): ``dict(type='Pretrained',
            checkpoint=...)`` loads what fits and reports the rest; nothing
            fitting is an error. Defaults to None, fresh weights.

    Raises:
        ValueError: For an unknown arch, or an out index without a layer.
    """

    arch_zoo: ClassVar[dict[str, dict[str, int]]] = {
        'tiny': dict(embed_dims=192, num_layers=12, num_heads=3),
        'small': dict(embed_dims=384, num_layers=12, num_heads=6),
        'base': dict(embed_dims=768, num_layers=12, num_heads=12),
        'l4': dict(embed_dims=1024, num_layers=4, num_heads=16),
        'large': dict(embed_dims=1024, num_layers=24, num_heads=16),
    }

    def __init__(
        self,
        arch: str | dict = 'tiny',
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        embed_dims: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        mlp_ratio: float = 4,
        out_indices: int | Sequence[int] = -1,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_cfg: dict | None = None,
        final_norm: bool = False,
        attn_cfg: dict | None = None,
        ffn: str = 'mlp',
        with_cp: bool = False,
        frozen_stages: int = -1,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        if isinstance(arch, str):
            if arch not in self.arch_zoo:
                raise ValueError(
                    f'arch={arch!r} is unknown; choose one of '
                    f'{sorted(self.arch_zoo)} or give a dict'
                )
            arch = self.arch_zoo[arch]
        self.embed_dims = embed_dims or arch['embed_dims']
        num_layers = num_layers or arch['num_layers']
        num_heads = num_heads or arch['num_heads']
        self.patch_size = patch_size
        self.out_indices = _layer_indices(out_indices, num_layers)
        self.with_cp = with_cp
        self.frozen_stages = frozen_stages

        height, width = (
            (img_size, img_size) if isinstance(img_size, int) else img_size
        )
        grid = (-(-height // patch_size), -(-width // patch_size))
        self.patch_embed = PatchEmbed(in_channels, self.embed_dims, patch_size)
        self.position = PositionEmbedding(self.embed_dims, grid)
        self.drop = nn.Dropout(drop_rate)

        norm_cfg = norm_cfg or dict(type='LN', eps=1e-6)
        attn_cfg = dict(attn_cfg or {})
        attention = attn_cfg.setdefault('variant', 'neumann') != 'none'
        self.layers = nn.ModuleList()
        for index in range(num_layers):
            rate = drop_path_rate * index / max(num_layers - 1, 1)
            attn = None
            if attention:
                attn = GlobalBranch(
                    build_norm_layer(norm_cfg, self.embed_dims)[1],
                    InfSAAttention(
                        self.embed_dims,
                        num_heads,
                        qkv_bias=qkv_bias,
                        **copy.deepcopy(attn_cfg),
                    ),
                    DropPath(rate),
                )
            hidden = int(mlp_ratio * self.embed_dims)
            mix = LocalBranch(
                build_norm_layer(norm_cfg, self.embed_dims)[1],
                FFN(self.embed_dims, hidden, ffn, drop_rate),
                DropPath(rate),
            )
            self.layers.append(Block(attn, mix))
        self.norm = (
            build_norm_layer(norm_cfg, self.embed_dims)[1]
            if final_norm
            else nn.Identity()
        )
        self._freeze_stages()

    def init_weights(self) -> None:
        """Load the pretrained file of ``init_cfg``, or draw fresh weights."""
        if (self.init_cfg or {}).get('type') == 'Pretrained':
            load_pretrained(
                self,
                self.init_cfg['checkpoint'],
                prefix=self.init_cfg.get('prefix'),
            )
            return
        super().init_weights()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _freeze_stages(self) -> None:
        if self.frozen_stages < 0:
            return
        stages = [self.patch_embed, self.position, self.drop]
        for stage in [*stages, *self.layers[: self.frozen_stages]]:
            stage.eval()
            for parameter in stage.parameters():
                parameter.requires_grad = False

    def train(self, mode: bool = True) -> InfViT:
        """Set the mode; frozen stages stay in evaluation mode."""
        super().train(mode)
        self._freeze_stages()
        return self

    def embed(
        self,
        x: Tensor,
        first: tuple[int, int] = (0, 0),
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Embed an image, or a part that is cut between tokens.

        Args:
            x: (B, channels, height, width).
            first: token row and column of the image at which it starts.
            size: token rows and columns of the image; None where x is all of
                it.

        Returns:
            (B, rows, columns, C).
        """
        return self.drop(self.position(self.patch_embed(x), first, size))

    def steps(self) -> Iterator[GlobalBranch | LocalBranch]:
        """All blocks as one flat list of global and local operations."""
        for layer in self.layers:
            assert isinstance(layer, Block)
            yield from layer.steps()

    def tap(self, index: int, x: Tensor) -> Tensor:
        """What layer ``index`` hands on of its output (B, ..., C)."""
        return self.norm(x) if index == len(self.layers) - 1 else x

    def forward(
        self,
        x: Tensor,
        merge: Merge = identity,
        halo: Halo = zero_rows,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the tapped feature maps, each (B, C, rows, columns).

        Args:
            x: image (B, channels, height, width).
            merge, halo: what lies outside, where x is a band of the image;
                see :mod:`infsa_seg.layers.protocol`.
            valid: (B, rows, columns) bool, True where a token counts; None
                for all.
        """
        x = self.embed(x)
        context = count_context([x], merge, [valid])
        taps = []
        for index, layer in enumerate(self.layers):
            run: Callable[..., Tensor] = layer
            if self.with_cp and x.requires_grad:
                run = functools.partial(checkpoint, layer, use_reentrant=False)
            x = run(x, merge=merge, halo=halo, valid=valid, context=context)
            if index in self.out_indices:
                tap = self.tap(index, x)
                taps.append(tap.permute(0, 3, 1, 2).contiguous())
        return tuple(taps)


def _layer_indices(
    out_indices: int | Sequence[int], num_layers: int
) -> tuple[int, ...]:
    if isinstance(out_indices, int):
        out_indices = [out_indices]
    for index in out_indices:
        if not -num_layers <= index < num_layers:
            raise ValueError(
                f'out_indices has {index}, but there are {num_layers} layers'
            )
    return tuple(sorted(index % num_layers for index in out_indices))
