# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Learning rates that fall from the last layer to the first."""

from __future__ import annotations

from mmengine.optim import DefaultOptimWrapperConstructor
from mmseg.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with a decay of the rate from layer to layer.

    With ``paramwise_cfg=dict(decay_rate=r)`` the learning rate of a
    parameter is multiplied by r once for each layer above it: by 1 in heads
    and norms behind the backbone, by r in its last layer, and by r to the
    power of the number of layers + 1 in patch embedding, positions and class
    token. Everything else in ``paramwise_cfg`` keeps its meaning.

    It goes with any model whose ``backbone`` is an ``InfViT``.

    Raises:
        ValueError: The backbone of the model has no ``layers``.
    """

    def add_params(
        self,
        params: list[dict],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: int | float | None = None,
    ) -> None:
        """As the base's, which comes back here for each part of a model."""
        first = len(params)
        super().add_params(params, module, prefix, is_dcn_module)
        if prefix:
            return
        # Once, with the whole model.
        rate = self.paramwise_cfg.get('decay_rate', 1.0)
        layers = getattr(getattr(module, 'backbone', None), 'layers', None)
        if layers is None:
            raise ValueError(
                'LayerDecayConstructor: the model has no backbone with '
                'layers, such as InfViT; use the default constructor'
            )
        num_layers = len(layers)
        names = {id(p): name for name, p in module.named_parameters()}
        for group in params[first:]:
            (parameter,) = group['params']
            above = num_layers + 1 - layer_id(names[id(parameter)], num_layers)
            group['lr'] = group.get('lr', self.base_lr) * rate**above


def layer_id(name: str, num_layers: int) -> int:
    """Where a parameter stands: 0 embedding, 1 first layer, ... heads last.

    Args:
        name (str): In the model, such as ``backbone.layers.3.ffn.norm.bias``.
        num_layers (int): Of the backbone.
    """
    part, _, rest = name.partition('.')
    if part == 'cls_token':
        return 0
    if part != 'backbone':
        return num_layers + 1
    kind, _, rest = rest.partition('.')
    if kind == 'layers':
        return int(rest.partition('.')[0]) + 1
    return num_layers + 1 if kind == 'norm' else 0
