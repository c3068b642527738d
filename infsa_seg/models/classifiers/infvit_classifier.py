# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A classifier of whole pictures, to pretrain an InfViT with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement
from mmseg.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infsa_seg.layers import Block
from infsa_seg.layers.protocol import count_context, identity
from infsa_seg.ops import Context, sum_dtype

from .data_preprocessor import one_hot

POOLS = ('mean', 'cls_token')


@MODELS.register_module()
class InfViTClassifier(BaseModel):
    """An ``InfViT``, a LayerNorm, one vector for all tokens, a linear layer.

    The class token, if there is one, belongs to the classifier: it takes
    part in every attention like any token, and a segmentor that begins with
    the backbone's weights has no use for it.

    Args:
        backbone (dict): Of an ``InfViT`` that returns its last layer.
        num_classes (int): K.
        pool (str): ``'mean'`` of all tokens that are no padding, or
            ``'cls_token'``. Defaults to ``'mean'``.
        label_smoothing (float): Share of each label that is spread over all
            classes in the loss. Defaults to 0.
        data_preprocessor (dict, optional): Defaults to
            ``dict(type='ClsDataPreprocessor')``.
        init_cfg (dict, optional): As for mmengine's ``BaseModel``. Weights
            for the backbone alone go into its own.

    Raises:
        ValueError: The pool is unknown, or the backbone keeps its last layer
            to itself.
    """

    def __init__(
        self,
        backbone: dict,
        num_classes: int,
        pool: str = 'mean',
        label_smoothing: float = 0.0,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        preprocessor = data_preprocessor or dict(type='ClsDataPreprocessor')
        # Built here: the base would look in mmengine's own registry.
        super().__init__(MODELS.build(preprocessor), init_cfg)
        if pool not in POOLS:
            raise ValueError(
                f'pool={pool!r} is unknown; choose one of {POOLS}'
            )
        self.backbone = MODELS.build(backbone)
        if self.backbone.out_indices[-1] != len(self.backbone.layers) - 1:
            raise ValueError(
                f'out_indices={self.backbone.out_indices} of the backbone '
                'leave out the last layer, which is classified; use -1'
            )
        self.num_classes = num_classes
        self.pool = pool
        self.label_smoothing = label_smoothing
        dims = self.backbone.embed_dims
        self.cls_token: nn.Parameter | None = None
        if pool == 'cls_token':
            self.cls_token = nn.Parameter(torch.empty(dims))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.norm = nn.LayerNorm(dims, eps=1e-6)
        self.head = nn.Linear(dims, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        inputs: Tensor,
        data_samples: Sequence[BaseDataElement] | None = None,
        mode: str = 'tensor',
    ) -> Any:
        """Classify a batch.

        Args:
            inputs: (B, channels, height, width), normalised.
            data_samples: One for each picture. ``gt_score`` (K) goes before
                ``gt_label`` in the loss; where ``img_shape`` is smaller than
                the batch, the rest is padding.
            mode: ``'loss'``, ``'predict'`` or ``'tensor'``.

        Returns:
            ``'tensor'``: logits (B, K). ``'loss'``: ``dict(loss=...)``.
            ``'predict'``: the samples, each with ``pred_score`` (K), which
            sums to one, and ``pred_label``.

        Raises:
            ValueError: The mode is unknown, or a label is no class.
        """
        if mode == 'tensor':
            return self._classify(inputs, data_samples)
        if mode == 'loss':
            return self.loss(inputs, data_samples or [])
        if mode == 'predict':
            return self.predict(inputs, data_samples)
        raise ValueError(f'mode={mode!r} is none of loss, predict, tensor')

    def loss(
        self, inputs: Tensor, data_samples: Sequence[BaseDataElement]
    ) -> dict[str, Tensor]:
        """The cross-entropy with smoothed labels, mean of the batch."""
        logits = self._classify(inputs, data_samples)
        if all('gt_score' in sample for sample in data_samples):
            target = torch.stack([sample.gt_score for sample in data_samples])
        else:
            target = one_hot(data_samples, self.num_classes)
        loss = F.cross_entropy(
            logits,
            target.to(logits),
            label_smoothing=self.label_smoothing,
        )
        return {'loss': loss}

    def predict(
        self,
        inputs: Tensor,
        data_samples: Sequence[BaseDataElement] | None = None,
    ) -> list[BaseDataElement]:
        """Add ``pred_score`` and ``pred_label`` to each sample."""
        scores = self._classify(inputs, data_samples).softmax(-1)
        samples = data_samples or [BaseDataElement() for _ in inputs]
        for sample, score in zip(samples, scores, strict=True):
            sample.pred_score = score
            sample.pred_label = score.argmax()
        return list(samples)

    def _classify(
        self, inputs: Tensor, samples: Sequence[BaseDataElement] | None
    ) -> Tensor:
        """Logits (B, K), in float32 or better whatever the network's."""
        valid = self._valid_tokens(inputs, samples)
        if self.pool == 'cls_token':
            pooled = self.norm(self._class_token(inputs, valid))
        else:
            x = self.backbone(inputs, valid=valid)[-1]
            pooled = _mean(self.norm(x.flatten(2).mT), valid)
        logits = self.head(pooled)
        return logits.to(sum_dtype(logits.dtype))

    def _valid_tokens(
        self, inputs: Tensor, samples: Sequence[BaseDataElement] | None
    ) -> Tensor | None:
        """(B, rows, columns), True where a token has pixels; None for all."""
        size = tuple(inputs.shape[-2:])
        shapes = [tuple(s.get('img_shape', size)) for s in samples or ()]
        if all(shape == size for shape in shapes):
            return None
        patch = self.backbone.patch_size
        # The token that an edge passes through has some pixels.
        starts = [
            torch.arange(0, side, patch, device=inputs.device) for side in size
        ]
        shape = torch.tensor(shapes, device=inputs.device)
        rows, columns = (
            start < side[:, None]
            for start, side in zip(starts, shape.T, strict=True)
        )
        return rows[:, :, None] & columns[:, None]

    def _class_token(self, inputs: Tensor, valid: Tensor | None) -> Tensor:
        """The class token behind the last layer, (B, C)."""
        x = self.backbone.embed(inputs)
        size = x.shape[1:3]
        x = x.flatten(1, 2)
        assert self.cls_token is not None
        token = self.cls_token.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([token, x], 1)
        if valid is not None:
            valid = F.pad(valid.flatten(1), (1, 0), value=True)
        context = count_context([x], identity, [valid])
        for layer in self.backbone.layers:
            run: Callable[..., Tensor] = _run_layer
            if self.backbone.with_cp and x.requires_grad:
                run = functools.partial(
                    checkpoint, _run_layer, use_reentrant=False
                )
            x = run(layer, x, size, valid, context)
        return self.backbone.norm(x[:, 0])


def _run_layer(
    layer: Block,
    x: Tensor,
    size: torch.Size,
    valid: Tensor | None,
    context: Context,
) -> Tensor:
    """A layer on (B, 1 + rows * columns, C), the class token first."""
    if layer.attn is not None:
        x = layer.attn(x, valid=valid, context=context)
    if not layer.ffn.halo:
        return layer.ffn(x[:, None])[:, 0]
    # Neighbours are mixed: the token has none.
    token, grid = x[:, None, :1], x[:, 1:].unflatten(1, size)
    if valid is not None:
        valid = valid[:, 1:].unflatten(1, size)
    token = layer.ffn(token)
    grid = layer.ffn(grid, valid=valid)
    return torch.cat([token[:, 0], grid.flatten(1, 2)], 1)


def _mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over tokens, (B, N, C) to (B, C)."""
    if valid is None:
        return x.mean(1)
    weight = valid.flatten(1).to(x.dtype)[..., None]
    return x.where(weight > 0, x.new_zeros(())).sum(1) / weight.sum(1)
