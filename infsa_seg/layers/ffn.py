# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks on a grid of tokens."""

from __future__ import annotations

from torch import Tensor, nn


class FFN(nn.Module):
    """Two linears with a GELU, on each token or with its neighbours.

    Kind 'mlp' acts token by token; 'dwconv' has a depthwise 3x3 between the
    linears, which mixes neighbours and tells position.

    Args:
        embed_dims: channels C.
        hidden_dims: channels between the two linears.
        kind: 'mlp' or 'dwconv'.
        drop: dropout rate after each linear.

    Attributes:
        halo: rows of context on each side, 0 or 1. The convolution pads with
            zeros; a band's rows are right where its halo rows are there.

    Raises:
        ValueError: for an unknown kind.
    """

    def __init__(
        self,
        embed_dims: int,
        hidden_dims: int,
        kind: str = 'mlp',
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in ('mlp', 'dwconv'):
            raise ValueError(f"ffn={kind!r} is unknown; use 'mlp' or 'dwconv'")
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.dwconv: nn.Conv2d | None = None
        if kind == 'dwconv':
            self.dwconv = nn.Conv2d(
                hidden_dims, hidden_dims, 3, padding=1, groups=hidden_dims
            )
            # Starts near the identity, so that a token keeps its own features.
            self.dwconv.weight.data[:, :, 1, 1] += 1
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, embed_dims)
        self.drop = nn.Dropout(drop)
        self.halo = 0 if kind == 'mlp' else 1

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, rows, columns, C) to the same shape.

        Args:
            x: the tokens.
            valid: (B, rows, columns) bool; the neighbours of an invalid
                token see a zero there, as they do beyond the border.
        """
        x = self.fc1(x)
        if self.dwconv is not None:
            if valid is not None:
                x = x.masked_fill(~valid[..., None], 0)
            x = self.dwconv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.drop(self.act(x))
        return self.drop(self.fc2(x))
