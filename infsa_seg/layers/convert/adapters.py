# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Attention called, and answering, as other projects' layers do.

Shapes: B batch, N tokens, C channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..attention import InfSAAttention


class Adapter(nn.Module):
    """An attention layer and what its predecessor did with the output.

    Args:
        attn: the attention.
        after: modules of the predecessor that follow its output projection,
            such as dropout and layer scale.
    """

    attn: InfSAAttention

    def __init__(self, attn: InfSAAttention, *after: nn.Module) -> None:
        super().__init__()
        self.add_module('attn', attn)
        self.after = nn.Sequential(*after)

    def _refuse(self, **arguments: object) -> None:
        """Raise a ValueError if one of these is given."""
        for name, value in arguments.items():
            if value is not None and value is not False:
                raise ValueError(
                    f'attention of variant {self.attn.variant!r} joins all '
                    f'tokens and takes no {name}'
                )

    def _attend(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Attend from tokens (B, N, C) to themselves or to others.

        Raises:
            ValueError: these are no tokens.
        """
        if x.dim() != 3:
            raise ValueError(
                f'attention takes tokens (B, N, C), not {tuple(x.shape)}'
            )
        if keys is None:
            out = self.attn(x)
        else:
            out, _ = self.attn(x, keys, keys, need_weights=False)
        return self.after(out)


class FusedAttention(Adapter):
    """In the place of timm's, DINOv2's and mmpretrain's self-attention."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        attn_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, C) to the same; masks are refused."""
        self._refuse(
            attn_mask=attn_mask, is_causal=is_causal, attn_bias=attn_bias
        )
        return self._attend(x)


class WrappedAttention(Adapter):
    """In the place of mmcv's MultiheadAttention, which adds the identity."""

    def __init__(
        self, attn: InfSAAttention, *after: nn.Module, batch_first: bool
    ) -> None:
        super().__init__(attn, *after)
        self.embed_dims = attn.embed_dims
        self.num_heads = attn.num_heads
        self.batch_first = batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As mmcv's layer, (B, N, C) or (N, B, C); ``kwargs`` are unused."""
        # The name of `identity` in older code.
        identity = kwargs.get('residual', identity)
        key = query if key is None else key
        value = key if value is None else value
        identity = query if identity is None else identity
        itself = key is query
        if (
            key_pos is None
            and query_pos is not None
            and query_pos.shape == key.shape
        ):
            key_pos = query_pos
        if query_pos is not None:
            query = query + query_pos
        if itself and key_pos is query_pos:
            # That it is one tensor tells the attention that they are one set.
            value = query if query_pos is None and value is key else value
            key = query
        elif key_pos is not None:
            key = key + key_pos
        out, _ = self.attn(
            query,
            key,
            value,
            key_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
        )
        return identity + self.after(out)


class VisionAttention(Adapter):
    """In the place of the ViT attention of Hugging Face's transformers.

    Args:
        attn: the attention.
        *after: see :class:`Adapter`.
        as_tuple: whether the layer answers with a tuple, whose second part
            are the weights if ``output_attentions``.
    """

    def __init__(
        self, attn: InfSAAttention, *after: nn.Module, as_tuple: bool
    ) -> None:
        super().__init__(attn, *after)
        self.as_tuple = as_tuple

    def forward(
        self,
        hidden_states: Tensor,
        head_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, ...]:
        """(B, N, C) to the same.

        Raises:
            ValueError: for a mask, another argument of unknown meaning, or
                weights from a variant that has no N x N matrix of them.
        """
        self._refuse(head_mask=head_mask, **kwargs)
        if not output_attentions:
            out = self._attend(hidden_states)
            return (out,) if self.as_tuple else out
        if self.attn.variant not in ('pure', 'softmax'):
            raise ValueError(
                f'attention of variant {self.attn.variant!r} has no matrix '
                'of weights; call the model without output_attentions'
            )
        x = hidden_states
        out, weights = self.attn(x, x, x, average_attn_weights=False)
        return (self.after(out), weights)


class ReducedAttention(Adapter):
    """Self-attention whose keys may come from a reduced grid, as SegFormer's.

    Args:
        attn: the attention.
        *after: see :class:`Adapter`.
        reduction: convolution that makes the smaller grid, or None.
        norm: normalisation of its tokens, or None.
    """

    def __init__(
        self,
        attn: InfSAAttention,
        *after: nn.Module,
        reduction: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(attn, *after)
        self.reduction = reduction
        self.norm = norm

    def _attend_on_grid(self, x: Tensor, height: int, width: int) -> Tensor:
        if self.reduction is None:
            return self._attend(x)
        batch, _, channels = x.shape
        grid = x.transpose(1, 2).reshape(batch, channels, height, width)
        keys = self.reduction(grid).flatten(2).transpose(1, 2)
        if self.norm is not None:
            keys = self.norm(keys)
        return self._attend(x, keys)


class PyramidAttention(ReducedAttention):
    """As in PVT and in SegFormer's first home."""

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        """(B, N, C) to the same, with N = H x W."""
        return self._attend_on_grid(x, H, W)


class EfficientAttention(ReducedAttention):
    """In the place of mmsegmentation's EfficientMultiheadAttention."""

    def forward(
        self,
        x: Tensor,
        hw_shape: tuple[int, int],
        identity: Tensor | None = None,
    ) -> Tensor:
        """(B, N, C) to the same, plus ``identity`` or the input."""
        out = self._attend_on_grid(x, *hw_shape)
        return (x if identity is None else identity) + out


class SegformerAttention(ReducedAttention):
    """In the place of transformers' SegformerAttention."""

    def __init__(self, *args: Any, as_tuple: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.as_tuple = as_tuple

    def forward(
        self,
        hidden_states: Tensor,
        height: int,
        width: int,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, ...]:
        """(B, N, C) to the same; weights are refused."""
        self._refuse(output_attentions=output_attentions, **kwargs)
        out = self._attend_on_grid(hidden_states, height, width)
        return (out,) if self.as_tuple else out
