# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What training by a config will take on every rank, without training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from infsa_seg.execution import (
    AbsentRanks,
    Activations,
    Communication,
    Grid,
    ParallelDims,
    ZeroShares,
    communication,
    foresee_activations,
    spatial_forward,
    zero_shares,
)
from infsa_seg.execution.training_plan import REDUCE_BUCKET
from infsa_seg.models.utils import SegmentorNetwork
from infsa_seg.ops import Axis, Place

from .config import load_config

PRECISIONS = ('fp32', 'bf16', 'fp16')


@dataclass(frozen=True)
class Estimate:
    """What a rank of a job takes.

    Attributes:
        config: the file.
        dims: how many ranks, and how many of them share an image.
        crop: height and width in pixels.
        batch_size: images of a spatial group.
        zero_stage, precision, recompute: as asked for.
        num_weights: of the model.
        shares: of weights, gradients and optimizer.
        activations: of the rank with the most rows.
        traffic: what it sends within its spatial group; None where it has an
            image for itself, or the network cannot be divided.
    """

    config: str
    dims: ParallelDims
    crop: tuple[int, int]
    batch_size: int
    zero_stage: int
    precision: str
    recompute: bool
    num_weights: int
    shares: ZeroShares
    activations: Activations
    traffic: Communication | None

    @property
    def backward_bytes(self) -> int:
        """Most memory before the optimizer's step."""
        return self.shares.backward + self.activations.peak

    @property
    def peak_bytes(self) -> int:
        """Most memory of a rank."""
        return max(self.backward_bytes, self.shares.update)


def estimate_memory(
    config: str | Path | Config,
    world_size: int = 1,
    spatial_parallel_size: int = 1,
    crop: tuple[int, int] | None = None,
    zero_stage: int | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    recompute: bool | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> Estimate:
    """Foresee memory and communication of a step of training.

    Nothing is trained and no memory of that size is needed: forward and
    backward pass run on tensors without contents. The optimizer is taken to
    be AdamW, losses that are not in strips for cross-entropy at the size
    of the labels.

    Args:
        config (str | Path | Config): As for :func:`load_config`.
        world_size (int): Processes, one a device.
        spatial_parallel_size (int): Of them, how many share an image.
        crop (tuple[int, int], optional): Height and width. Defaults to the
            ``size`` of the config's data preprocessor.
        zero_stage (int, optional): 0 to 3. Defaults to the config's.
        batch_size (int, optional): Images of a spatial group. Defaults to
            the config's ``train_dataloader.batch_size``.
        precision (str, optional): 'fp32', 'bf16' or 'fp16', as the strategy's
            section of that name. Defaults to the config's.
        recompute (bool, optional): Activation checkpointing of the backbone,
            ``with_cp``. Defaults to the config's.
        cfg_options (dict, optional): Values by dotted key.

    Raises:
        FileNotFoundError: The config is not there.
        ValueError: It, or an option, is not usable.
    """
    cfg = load_config(config, cfg_options)
    dims = ParallelDims(world_size, spatial_parallel_size)
    strategy = cfg.get('strategy') or {}
    zero = _zero_options(strategy)
    if zero_stage is None:
        zero_stage = strategy.get('stage') or zero.get('stage', 0)
    if precision is None:
        precision = _precision(strategy)
    if precision not in PRECISIONS:
        raise ValueError(
            f'precision={precision!r} is unknown; choose one of {PRECISIONS}'
        )
    crop = crop or _crop(cfg)
    if batch_size is None:
        batch_size = cfg.get('train_dataloader', {}).get('batch_size', 1)
    model = _build(cfg, recompute)
    half = precision != 'fp32'
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    shares = zero_shares(
        trained,
        total - trained,
        world_size,
        zero_stage,
        half,
        zero.get('reduce_bucket_size', REDUCE_BUCKET),
    )
    step = _Step(model, crop, batch_size, spatial_parallel_size)
    traffic = None
    if spatial_parallel_size > 1:
        traffic = communication(
            SegmentorNetwork(model),
            *crop,
            spatial_parallel_size,
            step.rank,
            batch_size,
            recompute=model.backbone.with_cp,
        )
    return Estimate(
        str(cfg.filename or 'config'),
        dims,
        crop,
        batch_size,
        zero_stage,
        precision,
        bool(getattr(model.backbone, 'with_cp', False)),
        total,
        shares,
        foresee_activations(model, step, step.inputs, half),
        traffic,
    )


def _zero_options(strategy: dict[str, Any]) -> dict[str, Any]:
    return strategy.get('zero_optimization') or {}


def _precision(strategy: dict[str, Any]) -> str:
    for name in ('bf16', 'fp16'):
        if (strategy.get(name) or {}).get('enabled'):
            return name
    return 'fp32'


def _crop(cfg: Config) -> tuple[int, int]:
    size = (cfg.model.get('data_preprocessor') or {}).get('size')
    if not size:
        raise ValueError(
            f'{cfg.filename}: model.data_preprocessor has no size; give the '
            'crop, its height and width'
        )
    return tuple(size)


def _build(cfg: Config, recompute: bool | None) -> Any:
    """The model in training mode, without contents."""
    with (
        DefaultScope.overwrite_default_scope('mmseg'),
        torch.device('meta'),
    ):
        model = MODELS.build(cfg.model)
    if not hasattr(model, 'decode_head'):
        raise ValueError(
            f'{cfg.filename}: {type(model).__name__} has no decode_head; only '
            'models like EncoderDecoder can be estimated'
        )
    if recompute is not None:
        if not hasattr(model.backbone, 'with_cp'):
            raise ValueError(
                f'{cfg.filename}: {type(model.backbone).__name__} has no '
                'with_cp, so that recomputation cannot be chosen'
            )
        model.backbone.with_cp = recompute
    return revert_sync_batchnorm(model).train()


class _Step:
    """The forward pass of the rank with the most rows."""

    def __init__(
        self, model: Any, crop: tuple[int, int], batch: int, spatial: int
    ) -> None:
        self.height, self.width = crop
        self.batch, self.spatial = batch, spatial
        self.channels = _channels(model)
        self.rank, self.rows = 0, self.height
        if spatial == 1:
            patch = getattr(model.backbone, 'patch_size', 1)
            self.rows += -self.height % patch
            self.width += -self.width % patch
            return
        grid = Grid(self.height, self.width, model.backbone.patch_size)
        if grid.rows < spatial:
            raise ValueError(
                f'crops of {self.height} rows have {grid.rows} token rows, '
                f'fewer than the {spatial} ranks of a spatial group'
            )
        if not getattr(model.decode_head, 'loss_in_bands', False):
            raise ValueError(
                'a spatial group needs model.decode_head.loss_decode.type='
                'BandCrossEntropyLoss; set it with --cfg-options'
            )
        heights = [
            grid.pixel_rows(AbsentRanks(spatial, rank).rows(grid.rows))
            for rank in range(spatial)
        ]
        # In the middle there are two neighbours.
        self.rank = max(
            range(spatial),
            key=lambda rank: (
                heights[rank].num_rows,
                -abs(2 * rank - spatial),
            ),
        )
        self.rows = heights[self.rank].num_rows
        self.parallel: Any = AbsentRanks(spatial, self.rank)

    @property
    def inputs(self) -> list[Tensor]:
        """Pixels and labels of the rank, without contents."""
        place = (self.rows, self.width)
        return [
            torch.empty(self.batch, self.channels, *place, device='meta'),
            torch.empty(self.batch, *place, dtype=torch.long, device='meta'),
        ]

    def __call__(self, model: Any, pixels: Tensor, label: Tensor) -> Tensor:
        if self.spatial == 1:
            features = model.extract_feat(pixels)
            heads = [model.decode_head]
            if model.with_auxiliary_head:
                extra = model.auxiliary_head
                many = isinstance(extra, nn.ModuleList)
                heads += list(extra) if many else [extra]
            losses = [_loss(head, head(features), label) for head in heads]
            return sum(losses[1:], losses[0])
        result = spatial_forward(
            SegmentorNetwork(model),
            pixels,
            self.height,
            self.parallel,
            recompute=model.backbone.with_cp,
        )
        return _loss(model.decode_head, result.logits, label, result.place)


def _channels(model: Any) -> int:
    for module in model.backbone.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels * module.groups
    return 3


def _loss(
    head: Any, logits: Tensor, label: Tensor, place: Place | None = None
) -> Tensor:
    batch, height, width = label.shape
    if not getattr(head, 'loss_in_bands', False):
        fine = F.interpolate(logits, size=(height, width), mode='bilinear')
        return F.cross_entropy(fine.float(), label)
    if place is None:
        place = Place(
            Axis(0, logits.shape[2], height), Axis(0, logits.shape[3], width)
        )
    # All strips take the same, and a few of them are enough.
    rows = max(head.max_logits // (batch * logits.shape[1] * width), 16)
    losses = head.band_losses(logits, label[:, :rows], place)
    return torch.stack([x for k, x in losses.items() if 'loss' in k]).sum()
