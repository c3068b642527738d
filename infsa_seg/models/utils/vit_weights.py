# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Weights of other projects' Vision Transformers for InfViT.

What an entry is, its name decides; numbers of entries are only checked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .vit_names import POSITIONS, REFUSED, TOKENS, find_prefix, our_name


class Shape(NamedTuple):
    """Of the transformer, for :class:`infsa_seg.models.InfViT`.

    Args:
        embed_dims: Width.
        num_layers: Layers.
        patch_size: Side of a patch in pixels.
        in_channels: Channels of the image.
        hidden_dims: Width inside the MLP.
        grid: Rows and columns of the positions.
        qkv_bias: Whether queries, keys and values have a bias.
        final_norm: Whether the output is normalised.
    """

    embed_dims: int
    num_layers: int
    patch_size: int
    in_channels: int
    hidden_dims: int
    grid: tuple[int, int]
    qkv_bias: bool
    final_norm: bool

    def arguments(self) -> dict:
        """Arguments of InfViT, without those that the weights do not tell."""
        rows, columns = self.grid
        side = self.patch_size
        return dict(
            img_size=(rows * side, columns * side),
            patch_size=side,
            in_channels=self.in_channels,
            embed_dims=self.embed_dims,
            num_layers=self.num_layers,
            mlp_ratio=self.hidden_dims / self.embed_dims,
            qkv_bias=self.qkv_bias,
            final_norm=self.final_norm,
        )


@dataclass(frozen=True)
class VitWeights:
    """Weights for an InfViT.

    Attributes:
        state (dict[str, Tensor]): By InfViT's names.
        shape (Shape): Of the transformer.
        prefix (str): What was taken off the names.
        unexpected (tuple[str]): Entries without a place in InfViT.
        notes (tuple[str]): What else was done, in words.
    """

    state: dict[str, Tensor]
    shape: Shape
    prefix: str
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]


def rename_vit(
    entries: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    img_size: tuple[int, int] | None = None,
) -> VitWeights:
    """Put the weights of a Vision Transformer under InfViT's names.

    The class token has no place in InfViT and is left out with its position,
    as is a distillation token. Layer scale is multiplied into the projection
    that it follows.

    Args:
        entries (Mapping[str, Tensor]): A state dict.
        grid (tuple[int, int], optional): Rows and columns of the positions.
        img_size (tuple[int, int], optional): Height and width in pixels of
            the image for which the positions are, where ``grid`` is not
            given.

    Returns:
        VitWeights: The weights.

    Raises:
        ValueError: Nothing in it is known; it is a transformer of another
            kind, named in the text; or the grid is not known.
    """
    prefix = find_prefix(entries)
    names = [name for name in entries if name.startswith(prefix)]
    inner = {name.removeprefix(prefix): entries[name] for name in names}
    for kind, pattern in REFUSED.items():
        found = [name for name in inner if re.search(pattern, name)]
        if found:
            raise ValueError(
                f'has {kind} ({found[0]}), which InfViT lacks; the weights '
                'would compute something else'
            )
    state: dict[str, Tensor] = {}
    unexpected = [name for name in entries if not name.startswith(prefix)]
    tokens: dict[str, int] = {}
    positions = None
    for name, value in inner.items():
        ours = our_name(name)
        if ours is not None:
            if ours in state:
                raise ValueError(f'{name}: a second entry for {ours}')
            state[ours] = value
        elif name in POSITIONS:
            positions = value
        else:
            unexpected.append(prefix + name)
            if name in TOKENS:
                tokens[TOKENS[name]] = value.shape[1]
    weight = state.get('patch_embed.projection.weight')
    if weight is None or weight.dim() != 4:
        raise ValueError('has no projection of patches')
    if positions is None:
        raise ValueError(
            'has no learned positions, which InfViT needs; is it of another '
            'kind?'
        )
    notes = [
        f'{kind} token left out with its position; InfViT has none'
        for kind in tokens
    ]
    state['position.weight'] = _grid_of_positions(
        positions, tokens, weight.shape[-1], grid, img_size
    )
    _split(state)
    if _scale(state):
        notes.append('layer scale multiplied into the projections')
    notes += _fill(state)
    return VitWeights(
        state, _shape(state), prefix, tuple(unexpected), tuple(notes)
    )


def _grid_of_positions(
    positions: Tensor,
    tokens: Mapping[str, int],
    patch_size: int,
    grid: tuple[int, int] | None,
    img_size: tuple[int, int] | None,
) -> Tensor:
    """(1, tokens + rows x columns, C) to (rows, columns, C)."""
    if positions.dim() == 4:  # (1, rows, columns, C)
        return positions[0]
    count, channels = positions.shape[-2:]
    # Of the tokens there, all have a position or none.
    extra = sum(tokens.values())
    if grid is None and img_size is not None:
        grid = (img_size[0] // patch_size, img_size[1] // patch_size)
    if grid is None:
        raise ValueError(
            f'has {count - extra} positions of patches of {patch_size} '
            'pixels, and does not say in how many rows and columns; give '
            '--grid ROWS COLUMNS or --img-size HEIGHT WIDTH'
        )
    number = grid[0] * grid[1]
    if count not in (number + extra, number):
        raise ValueError(
            f'has {count} positions, {extra} of them of other tokens, not '
            f'the {number} of a grid of {grid[0]} x {grid[1]} patches of '
            f'{patch_size} pixels'
        )
    flat = positions.reshape(count, channels)[count - number :]
    return flat.reshape(*grid, channels).clone()


def _split(state: dict[str, Tensor]) -> None:
    """Packed projections into three."""
    for name in [name for name in state if '.qkv.' in name]:
        packed = state.pop(name)
        for part, value in zip('qkv', packed.chunk(3), strict=True):
            ours = name.replace('.qkv.', f'.{part}_proj.')
            state[ours] = value.clone()


def _scale(state: dict[str, Tensor]) -> bool:
    """Multiply scales into the projections before them, in float64."""
    scales = [name for name in state if name.endswith('.scale')]
    for name in scales:
        scale = state.pop(name).double().flatten()
        projection = name.removesuffix('.scale')
        for part in ('weight', 'bias'):
            value = state.get(f'{projection}.{part}')
            if value is not None:
                by = scale[:, None] if part == 'weight' else scale
                scaled = value.double() * by
                state[f'{projection}.{part}'] = scaled.to(value.dtype)
    return bool(scales)


def _fill(state: dict[str, Tensor]) -> list[str]:
    """Biases that InfViT has and the source may lack: zeros."""
    kinds = []
    for kind in ('patch_embed.projection', 'attn.op.out_proj'):
        weights = [n for n in state if n.endswith(f'{kind}.weight')]
        for name in weights:
            bias = name.removesuffix('weight') + 'bias'
            if bias not in state:
                weight = state[name]
                state[bias] = weight.new_zeros(weight.shape[0])
                kinds.append(kind)
    # One of three may be missing, where its bias would change nothing.
    for name in [n for n in state if n.endswith('.q_proj.bias')]:
        for part in ('k_proj', 'v_proj'):
            other = name.replace('q_proj', part)
            if other not in state:
                state[other] = state[name].new_zeros(state[name].shape)
                kinds.append(part)
    return [
        f'{kind} has no bias; set to zeros' for kind in dict.fromkeys(kinds)
    ]


def _shape(state: Mapping[str, Tensor]) -> Shape:
    layers = [re.match(r'layers\.(\d+)\.', name) for name in state]
    indices = {int(match[1]) for match in layers if match}
    if not indices:
        raise ValueError('has no layers')
    if indices != set(range(len(indices))):
        raise ValueError(f'has the layers {sorted(indices)}; some are missing')
    patches = state['patch_embed.projection.weight']
    width, channels, height, side = patches.shape
    if height != side:
        raise ValueError(f'has patches of {height} x {side}, not square ones')
    hidden = state.get('layers.0.ffn.op.fc1.weight')
    if hidden is None:
        raise ValueError('has no MLP in its first layer')
    grid = state['position.weight'].shape
    return Shape(
        embed_dims=width,
        num_layers=len(indices),
        patch_size=side,
        in_channels=channels,
        hidden_dims=hidden.shape[0],
        grid=(grid[0], grid[1]),
        qkv_bias='layers.0.attn.op.q_proj.bias' in state,
        final_norm='norm.weight' in state,
    )
