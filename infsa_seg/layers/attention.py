# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The attention layer: projections, discount, and the choice of operator."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn

from infsa_seg.ops import Context, recurrence, sum_dtype

from .autocast import no_autocast
from .protocol import GlobalOp, Merge, identity, run_global


def flat(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A band (B, ..., C) and its mask (B, ...) as tokens (B, N, ...)."""
    return x.flatten(1, -2), None if valid is None else valid.flatten(1)


def parse_hops(hops: float | str) -> float:
    """A positive integer or 'inf' as a number; ValueError for others."""
    number = float(hops)
    if not number >= 1 or (math.isfinite(number) and number != int(number)):
        raise ValueError(f"hops={hops} is no positive integer or 'inf'")
    return number


class InfSAAttention(nn.Module):
    """Multi-head Infinite Self-Attention; ``variant`` chooses the operator.

    Calling the class gives the subclass of the variant:
    ``InfSAAttention(192, 3, variant='linear')`` is a :class:`LinearInfSA`.
    Variants of O(N) are global operations
    (:class:`infsa_seg.layers.protocol.GlobalOp`). A call with key and value
    follows :class:`torch.nn.MultiheadAttention`; see :meth:`forward`.

    Args:
        embed_dims: channels C, a multiple of ``num_heads``.
        num_heads: heads H.
        variant: 'neumann', 'linear', 'pure' or 'softmax'.
        qkv_bias: whether query, key and value projections have a bias.
        discount: initial value of the discount, in (0, 1), in layers that
            learn one. It is stored as a logit per head; ``rho`` is accepted
            as another name.
        key_recurrence: replaces keys by their auxiliary state (DESIGN 3.4):
            ``normalize`` ('both' or 'once'), ``steps`` (a positive integer or
            'inf', the default) and ``alpha``, the initial value of a learnt
            discount per head, 0.7 unless given. Diverging states are damped.
        kdim, vdim: channels of keys and values that are not those of the
            queries; such a layer needs all three.
        batch_first: order of the first two dimensions in calls with key and
            value; a call with a query alone is always (B, ..., C).
        **kwargs: options of the variant, see its class.

    Raises:
        ValueError: for an unknown variant, a width that the heads do not
            divide, or a discount outside (0, 1).

    Loads the state dict of the reference package, whose scalar ``rho_logit``
    is spread over the heads.
    """

    variant: ClassVar[str]
    _variants: ClassVar[dict[str, type[InfSAAttention]]] = {}
    # Where torch's own encoder layer looks for its fused path.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init_subclass__(cls, variant: str | None = None) -> None:
        if variant is not None:
            cls.variant = variant
            cls._variants[variant] = cls

    def __new__(
        cls, *args: Any, variant: str = 'neumann', **kwargs: Any
    ) -> InfSAAttention:
        if cls is InfSAAttention:
            if variant not in cls._variants:
                raise ValueError(
                    f'variant={variant!r} is unknown; choose one of '
                    f'{sorted(cls._variants)}'
                )
            cls = cls._variants[variant]
        return super().__new__(cls.choose(**kwargs))

    @classmethod
    def choose(cls, **kwargs: Any) -> type[InfSAAttention]:
        """The class that implements a variant with these options."""
        return cls

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        variant: str = 'neumann',
        qkv_bias: bool = True,
        discount: float = 0.9,
        rho: float | None = None,
        key_recurrence: dict[str, Any] | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(
                f'embed_dims={embed_dims} is not a multiple of '
                f'num_heads={num_heads}'
            )
        self.initial_discount = discount if rho is None else rho
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.kdim, self.vdim = kdim or embed_dims, vdim or embed_dims
        self.batch_first = batch_first
        self.q_proj = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.k_proj = nn.Linear(self.kdim, embed_dims, bias=qkv_bias)
        self.v_proj = nn.Linear(self.vdim, embed_dims, bias=qkv_bias)
        self.out_proj = nn.Linear(embed_dims, embed_dims)
        self.discount_logit: nn.Parameter | None
        self.discount_logit = nn.Parameter(torch.empty(num_heads))
        self.recurrence = _parse_recurrence(key_recurrence)
        self.recurrence_logit: nn.Parameter | None = None
        if self.recurrence is not None:
            self.recurrence_logit = nn.Parameter(torch.empty(num_heads))
        InfSAAttention.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Start afresh what is the layer's own; the projections have theirs.

        Needed after the layer was made on the meta device.
        """
        with torch.no_grad():
            if self.discount_logit is not None:
                self.discount_logit.fill_(
                    _logit('discount', self.initial_discount)
                )
            if self.recurrence_logit is not None:
                assert self.recurrence is not None
                self.recurrence_logit.fill_(
                    _logit('alpha', self.recurrence['alpha'])
                )

    @property
    def discount(self) -> Tensor:
        """The discount of each head, (H,), in (0, 1), with its gradient."""
        assert self.discount_logit is not None
        return self.discount_logit.sigmoid()

    def queries(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, H, N, D)."""
        return self._split_heads(self.q_proj(x))

    def keys(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, H, N, D), through the recurrence if there is one.

        The latter in float32 or better.
        """
        k = self._split_heads(self.k_proj(x))
        if self.recurrence is None:
            return k
        assert self.recurrence_logit is not None
        with no_autocast(x.device):
            return recurrence.key_recurrence(
                k.to(sum_dtype(k.dtype)),
                self.recurrence_logit.sigmoid(),
                self.recurrence['steps'],
                self.recurrence['normalize'],
                on_divergence='clamp',
            )

    def values(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, H, N, D)."""
        return self._split_heads(self.v_proj(x))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dims).transpose(
            1, 2
        )

    def join_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, D) to (B, N, C), through the output projection."""
        x = x.to(self.out_proj.weight.dtype)
        return self.out_proj(x.transpose(1, 2).flatten(-2))

    @overload
    def forward(
        self,
        query: Tensor,
        *,
        key_padding_mask: Tensor | None = ...,
        merge: Merge = ...,
        valid: Tensor | None = ...,
        context: Context | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = ...,
        need_weights: bool = ...,
        attn_mask: Tensor | None = ...,
        average_attn_weights: bool = ...,
        is_causal: bool = ...,
    ) -> tuple[Tensor, Tensor | None]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        merge: Merge = identity,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attend over a whole image or a band of it, or as PyTorch's layer.

        With a query alone, the image attends to itself:

        Args:
            query: tokens (B, ..., C), or (N, C).
            merge: completes each state where others hold parts of the image.
            valid: (B, ...) bool, True where a token counts; None for all.
            context: holds the number of valid tokens of the image; None
                counts them.

        Returns:
            (B, ..., C), zero where masked.

        With key and value, the call and the result are those of
        :class:`torch.nn.MultiheadAttention`:

        Args:
            query: (B, N, C), or (N, B, C) without ``batch_first``, or (N, C).
            key, value: the same with L tokens of ``kdim`` and ``vdim``.
            key_padding_mask: (B, L), True (or -inf) where a key is to be
                ignored. Where query and key are one tensor, such a token
                receives nothing either; else every query does.
            need_weights: return weights too. The N x L matrix of the
                quadratic variants; for the others how much each key receives,
                (L,): scores of 'linear', centrality of 'neumann'.
            average_attn_weights: the mean over the heads instead of each.
            attn_mask, is_causal: refused; every token meets every other.

        Returns:
            The output, shaped like the query, and the weights or None,
            (B, N, L) or (B, L), with H after B if not averaged.

        Raises:
            ValueError: for an attention mask, a padding mask with other
                numbers than 0 and -inf, or a part of the image given to a
                variant that needs it all.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                f'attention of variant {self.variant!r} joins all tokens and '
                'takes no attn_mask or is_causal; hide tokens with '
                'key_padding_mask'
            )
        if key is None:
            if value is not None:
                raise ValueError('value is given without key')
            if key_padding_mask is not None:
                valid = _is_valid(key_padding_mask)
            if query.dim() == 2:
                mask = None if valid is None else valid[None]
                return self._attend_all(query[None], merge, mask, context)[0]
            return self._attend_all(query, merge, valid, context)
        if value is None:
            raise ValueError('key is given without value')
        return self._multihead(
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            average_attn_weights,
        )

    def _attend_all(
        self,
        x: Tensor,
        merge: Merge,
        valid: Tensor | None,
        context: Context | None,
    ) -> Tensor:
        out = self._attend_to_itself(x, merge, valid, context)
        return _hide_rows(out, valid)

    def _attend_to_itself(
        self,
        x: Tensor,
        merge: Merge,
        valid: Tensor | None,
        context: Context | None,
    ) -> Tensor:
        # Every variant that does not override this has the verbs.
        op = cast(GlobalOp, self)
        (out,) = run_global(op, [x], merge, [valid], context)
        return out

    def _multihead(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        itself = query is key
        tensors = [query, key, value]
        mask = key_padding_mask
        batched, seq_first = query.dim() == 3, not self.batch_first
        if not batched:
            tensors = [x[None] for x in tensors]
            mask = None if mask is None else mask[None]
        elif seq_first:
            tensors = [x.transpose(0, 1) for x in tensors]
        valid = None if mask is None else _is_valid(mask)
        if itself and value is key and not need_weights:
            out = self._attend_all(tensors[0], identity, valid, None)
            weights = None
        else:
            query_valid = valid
            if valid is not None and not itself:
                query_valid = valid.new_ones(tensors[0].shape[:2])
            heads, weights = self.operate(
                self.queries(tensors[0]),
                self.keys(tensors[1]),
                self.values(tensors[2]),
                valid,
                query_valid,
                need_weights,
            )
            out = _hide_rows(self.join_heads(heads), query_valid)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out.transpose(0, 1) if seq_first else out, weights

    def operate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        query_valid: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The operator on projected tokens, in one piece.

        Args:
            q: (B, H, N, D).
            k, v: (B, H, L, D).
            valid, query_valid: (B, L) and (B, N) bool, or None for all.
            need_weights: see :meth:`forward`.

        Returns:
            (B, H, N, D), and the weights per head or None.
        """
        raise NotImplementedError

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        logit = state_dict.pop(prefix + 'rho_logit', None)
        if logit is not None and self.discount_logit is not None:
            logit = logit.expand(self.num_heads).clone()
            state_dict[prefix + 'discount_logit'] = logit
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f'variant={self.variant!r}, num_heads={self.num_heads}'


def _logit(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f'{name}={value} is not inside (0, 1)')
    return math.log(value) - math.log1p(-value)


def _parse_recurrence(options: dict[str, Any] | None) -> dict[str, Any] | None:
    if options is None:
        return None
    result = {'normalize': 'both', 'steps': 'inf', 'alpha': 0.7, **options}
    unknown = result.keys() - {'normalize', 'steps', 'alpha'}
    if unknown:
        raise ValueError(
            f'key_recurrence has no option {sorted(unknown)[0]!r}; it takes '
            'normalize, steps and alpha'
        )
    result['steps'] = float(result['steps'])
    return result


def _hide_rows(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zero the masked tokens of (B, ..., C)."""
    return x if valid is None else x.masked_fill(~valid[..., None], 0)


def _is_valid(mask: Tensor) -> Tensor:
    """PyTorch's padding mask, True or -inf where ignored, turned round."""
    if mask.dtype == torch.bool:
        return ~mask
    hidden = mask == -torch.inf
    # Looking at the numbers would break a compiled graph.
    if not torch.compiler.is_compiling() and not (hidden | (mask == 0)).all():
        raise ValueError(
            'key_padding_mask has other numbers than 0 and -inf; weights '
            'cannot be added to these scores'
        )
    return ~hidden
