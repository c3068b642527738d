# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The attention layer: projections, discount, and the choice of operator."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from infsa_seg.ops import Context

from .protocol import GlobalOp, Merge, identity, run_global


class InfSAAttention(nn.Module):
    """Multi-head Infinite Self-Attention; ``variant`` chooses the operator.

    Calling the class gives the subclass of the variant:
    ``InfSAAttention(192, 3, variant='linear')`` is a :class:`LinearInfSA`.
    Variants of O(N) are global operations
    (:class:`infsa_seg.layers.protocol.GlobalOp`).

    Args:
        embed_dims: channels C, a multiple of ``num_heads``.
        num_heads: heads H.
        variant: 'neumann', 'linear', 'pure' or 'softmax'.
        qkv_bias: whether query, key and value projections have a bias.
        discount: initial value of the discount, in (0, 1), in layers that
            learn one. It is stored as a logit per head; ``rho`` is accepted
            as another name.
        **kwargs: options of the variant, see its class.

    Raises:
        ValueError: for an unknown variant, a width that the heads do not
            divide, or a discount outside (0, 1).

    Loads the state dict of the reference package, whose scalar ``rho_logit``
    is spread over the heads.
    """

    variant: ClassVar[str]
    _variants: ClassVar[dict[str, type[InfSAAttention]]] = {}

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
        return super().__new__(cls)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        variant: str = 'neumann',
        qkv_bias: bool = True,
        discount: float = 0.9,
        rho: float | None = None,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(
                f'embed_dims={embed_dims} is not a multiple of '
                f'num_heads={num_heads}'
            )
        discount = discount if rho is None else rho
        if not 0 < discount < 1:
            raise ValueError(f'discount={discount} is not inside (0, 1)')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.q_proj = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.k_proj = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.v_proj = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.out_proj = nn.Linear(embed_dims, embed_dims)
        self.discount_logit: nn.Parameter | None
        logit = torch.full(
            (num_heads,), math.log(discount) - math.log1p(-discount)
        )
        self.discount_logit = nn.Parameter(logit)

    @property
    def discount(self) -> Tensor:
        """The discount of each head, (H,), in (0, 1), with its gradient."""
        assert self.discount_logit is not None
        return self.discount_logit.sigmoid()

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, H, N, D)."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dims).transpose(
            1, 2
        )

    def forward(
        self,
        x: Tensor,
        merge: Merge = identity,
        valid: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Attend over a whole image, or over a band of it.

        Args:
            x: tokens (B, ..., C).
            merge: completes each state where others hold parts of the image.
            valid: (B, ...) bool, True where a token counts; None for all.
            context: holds the number of valid tokens of the image; None
                counts them.

        Returns:
            (B, ..., C).
        """
        # Every variant that does not override this has the verbs.
        op = cast(GlobalOp, self)
        (out,) = run_global(op, [x], merge, [valid], context)
        return out

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
