# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Training in which processes share the optimizer's state: DeepSpeed ZeRO."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mmengine._strategy import DeepSpeedStrategy
from mmengine.dist import (
    barrier,
    infer_launcher,
    is_distributed,
    is_main_process,
)
from mmengine.optim import BaseOptimWrapper
from mmengine.registry import STRATEGIES
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from infsa_seg import compat
from infsa_seg.execution import ParallelDims, SpatialParallel
from infsa_seg.layers.protocol import GlobalOp
from infsa_seg.models.utils import load_pretrained

from .files import atomic_path
from .zero_checkpoint import (
    ZeroFolder,
    as_plain,
    require_deepspeed,
    save_zero,
)
from .zero_offload import check_offload

_PRECISIONS = {'bf16': torch.bfloat16, 'fp16': torch.float16}


@STRATEGIES.register_module()
class ZeroStrategy(DeepSpeedStrategy):
    """mmengine's DeepSpeed strategy, made to work with today's DeepSpeed.

    Stage 0 shares nothing, 1 the optimizer's state, 2 the gradients too, 3
    also the weights. It differs from its base (mmengine 0.10.7 with DeepSpeed
    0.19.8) in that

    * it runs on CPUs (gloo) as on GPUs (nccl), in any number of processes,
      one without a launcher included, and compiles nothing;
    * ``clip_grad`` and ``accumulative_counts`` of ``optim_wrapper`` take
      effect, as ``auto_scale_lr`` does; what could not is refused;
    * any optimizer of PyTorch will do, with or without offload;
    * in ``bf16`` or ``fp16`` the network runs under autocast, so that
      operations that insist on float32 meet no weights of half precision;
    * checkpoints appear under their name when they are complete.

    Args:
        stage (int, optional): 0 to 3; goes before the one in
            ``zero_optimization``. Defaults to None: that one, else 0.
        load_from (str, optional): A plain checkpoint to begin with. It is
            read before the model is divided, in full precision.
        config (str | dict, optional): DeepSpeed's own configuration, or the
            JSON file that holds it.
        spatial_parallel_size (int): Processes, neighbours in rank, that train
            on one image, a band of its rows on each. Optimizer's state,
            gradients and weights are divided between all processes. Needs a
            ``BandEncoderDecoder`` and the ``SeededTrainLoop``. Defaults to 1.
        **kwargs: As for mmengine's ``DeepSpeedStrategy``:
            ``zero_optimization``, ``bf16``, ``fp16``, ``gradient_clipping``,
            ``gradient_accumulation_steps`` and others.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: A setting that would be without effect, or two that
            contradict each other; or ``spatial_parallel_size`` does not
            divide the number of processes.

    Attributes:
        dims (ParallelDims): How the processes are shared out.
    """

    def __init__(
        self,
        *,
        stage: int | None = None,
        load_from: str | None = None,
        config: str | dict | None = None,
        spatial_parallel_size: int = 1,
        **kwargs,
    ) -> None:
        require_deepspeed()
        # The base joins the other processes before it returns.
        self._spatial_size = spatial_parallel_size
        compat.tame_deepspeed()
        config = _plain(self._parse_config(config))
        # What is filled in below must not look as if the user had set it.
        self._given = {
            *config,
            *(key for key, value in kwargs.items() if value is not None),
        }
        super().__init__(config=config, **kwargs)
        self.config: dict[str, Any] = _plain(self.config)
        zero = self.config.setdefault('zero_optimization', {})
        if stage is not None:
            zero['stage'] = stage
        self.stage = zero.setdefault('stage', 0)
        if self.stage not in range(4):
            raise ValueError(f'strategy: ZeRO has stages 0 to 3, not {stage}')
        check_offload(zero, self.stage)
        self._check_precision()
        for section in ('optimizer', 'scheduler'):
            if section in self.config:
                raise ValueError(
                    f'strategy.config.{section} would be without effect: set '
                    'optim_wrapper and param_scheduler of the config'
                )
        # DeepSpeed 0.19.8 clips at 1.0 where nothing is said.
        self.config.setdefault('gradient_clipping', 0.0)
        self.config.setdefault('zero_allow_untested_optimizer', True)
        self.config.setdefault('zero_force_ds_cpu_optimizer', False)
        self._load_from = load_from

    def _setup_env(self, *, launcher: str | None = None, **kwargs) -> None:
        launcher = launcher or infer_launcher()
        if launcher == 'none' and not is_distributed():
            self._start_alone()
        super()._setup_env(launcher=launcher, **kwargs)
        self.dims = ParallelDims(self.world_size, self._spatial_size)

    def _start_alone(self) -> None:
        """A group of one process; it needs no port."""
        import deepspeed

        backend = _backend()
        os.environ.setdefault('LOCAL_RANK', '0')
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        deepspeed.init_distributed(backend, verbose=False)

    def _setup_distributed(  # type: ignore[override]
        self,
        launcher: str,
        backend: str | None = None,
        timeout: float | None = None,
        **kwargs,
    ) -> None:
        """Join the group; the backend of the config is for machines with GPUs.

        mmengine's own calls ``torch.cuda.set_device`` on all.
        """
        import deepspeed

        if torch.cuda.is_available():
            if timeout is not None:
                kwargs['timeout'] = timeout
            super()._setup_distributed(launcher, backend or 'nccl', **kwargs)
            return
        if launcher != 'pytorch':
            raise ValueError(
                f'--launcher {launcher}: needs GPUs, and none was found; '
                'start CPU processes with torchrun and --launcher pytorch'
            )
        if timeout is not None:
            kwargs['timeout'] = timedelta(seconds=timeout)
        deepspeed.init_distributed(_backend(), verbose=False, **kwargs)

    def prepare(self, model: nn.Module | dict, **kwargs) -> Any:
        """As the base's, with the batch size that DeepSpeed wants to know."""
        dispatch = kwargs.get('dispatch_kwargs') or {}
        key = 'train_micro_batch_size_per_gpu'
        self.config.setdefault(key, dispatch.get(key, 1))
        return super().prepare(model, **kwargs)

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        model = super()._init_model_weights(model)
        if self._load_from:
            load_pretrained(model, self._load_from, logger=self.logger)
        return model

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> BaseOptimWrapper:
        """Build DeepSpeed's wrapper from the settings of a plain one."""
        if isinstance(optim_wrapper, dict):
            optim_wrapper = self._translate(copy.deepcopy(optim_wrapper))
        wrapper = super().build_optim_wrapper(optim_wrapper, model)
        wrapper.optimizer.param_groups[:] = _merge_groups(
            wrapper.optimizer.param_groups
        )
        return wrapper

    def _translate(self, cfg: dict) -> dict:
        """Hand what DeepSpeed does itself on to it."""
        kind = cfg.get('type', 'OptimWrapper')
        if kind == 'AmpOptimWrapper':
            raise ValueError(
                'optim_wrapper AmpOptimWrapper: under ZeRO say '
                'strategy.bf16.enabled=True, or fp16, and use OptimWrapper'
            )
        if kind not in ('OptimWrapper', 'DeepSpeedOptimWrapper'):
            raise ValueError(
                f'optim_wrapper {kind}: does not go with ZeRO; use '
                'OptimWrapper'
            )
        cfg['type'] = 'DeepSpeedOptimWrapper'
        steps = cfg.pop('accumulative_counts', None)
        if steps is not None and steps != 1:
            self._agree(
                'gradient_accumulation_steps', 'accumulative_counts', steps
            )
        clip = cfg.pop('clip_grad', None)
        if clip:
            self._translate_clip(dict(clip))
        return cfg

    def _translate_clip(self, clip: dict) -> None:
        max_norm = clip.pop('max_norm', None)
        kind = clip.pop('type', 'norm')
        norm_type = clip.pop('norm_type', 2)
        if kind != 'norm' or max_norm is None or norm_type != 2 or clip:
            raise ValueError(
                'optim_wrapper.clip_grad: ZeRO clips the 2-norm of all '
                'gradients only; use clip_grad=dict(max_norm=...)'
            )
        self._agree('gradient_clipping', 'clip_grad.max_norm', max_norm)

    def _agree(self, mine: str, theirs: str, value: Any) -> None:
        if mine in self._given and self.config[mine] != value:
            raise ValueError(
                f'strategy has {mine}={self.config[mine]} and optim_wrapper '
                f'has {theirs}={value}: set one of them'
            )
        self.config[mine] = value

    @property
    def half(self) -> torch.dtype | None:
        """The precision of the weights, None for float32."""
        for section, dtype in _PRECISIONS.items():
            if self.config.get(section, {}).get('enabled'):
                return dtype
        return None

    def _check_precision(self) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if self.half is torch.float16 and not accelerator.is_fp16_supported():
            raise ValueError(
                f'strategy.fp16: a {accelerator.device_name()} has no fp16; '
                'use bf16=dict(enabled=True)'
            )

    def _scale_lr(self) -> None:
        scale: dict | None = self._auto_scale_lr  # type: ignore[has-type]
        if scale and 'base_batch_size' in scale:
            # The base takes every process for one with a batch of its own.
            base = scale['base_batch_size'] * self.dims.spatial
            self._auto_scale_lr = {**scale, 'base_batch_size': base}
        super()._scale_lr()

    def _wrap_model(self, model: nn.Module) -> Any:
        import deepspeed

        trains = hasattr(self, 'optim_wrapper')
        if trains:
            self._scale_lr()
        else:
            # Without an optimizer there is nothing to share.
            self.stage = self.config['zero_optimization']['stage'] = 0
        if self.half is not None:
            if any(isinstance(m, _BatchNorm) for m in model.modules()):
                raise ValueError(
                    'strategy: BatchNorm does not go with weights in half '
                    'precision; instead of bf16 or fp16 set strategy.config='
                    "dict(torch_autocast=dict(enabled=True, dtype='bfloat16'))"
                )
            model.forward = torch.autocast(_device(), self.half)(model.forward)
        if trains and self.dims.spatial > 1:
            self._share_images(model)
        wrapper = super()._wrap_model(model)
        if self.stage == 3:
            # Their projections are read without being called.
            for module in model.modules():
                if isinstance(module, GlobalOp):
                    for parameter in module.parameters():
                        deepspeed.zero.register_external_parameter(
                            module, parameter
                        )
        return wrapper

    def _share_images(self, model: Any) -> None:
        """Let every process train on a band.

        All processes stay one data-parallel group to DeepSpeed, which divides
        between all of them and averages over all of them. Its sequence groups
        would sum instead, but not in stage 3, where ``reduce_scatter``
        averages in them too (0.19.8), and they reduce in float32.
        """
        if not hasattr(model, 'share_images'):
            raise ValueError(
                f'spatial_parallel_size={self.dims.spatial}: a '
                f'{type(model).__name__} cannot train on bands; use '
                'BandEncoderDecoder'
            )
        model.share_images(SpatialParallel(self.dims.mesh(_device())))

    def load_checkpoint(self, filename: str, **kwargs) -> dict:
        """Load plain weights to test with.

        Raises:
            ValueError: The model is divided already.
        """
        if hasattr(self, 'optim_wrapper'):
            raise ValueError(
                f'{filename}: under ZeRO, weights to begin with are set as '
                'strategy.load_from'
            )
        load_pretrained(self.model.module, filename, logger=self.logger)
        return {}

    def resume(self, filename: str, **kwargs) -> dict:
        """Go on from a checkpoint of ZeRO.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is another kind of checkpoint, is damaged, or was
                saved by another number of processes or in another stage.
        """
        ZeroFolder(filename).check_fit(self.world_size, self.stage)
        return super().resume(filename, **kwargs)

    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict | None = None,
        callback: Callable | None = None,
    ) -> None:
        """Save a folder to go on from, or a plain file of weights.

        The latter where ``save_optimizer`` is False. All processes call it.
        """
        path = Path(filename)
        base = super().save_checkpoint
        if save_optimizer:

            def write(part: Path) -> None:
                base(
                    str(part),
                    save_param_scheduler=save_param_scheduler,
                    extra_ckpt=extra_ckpt,
                )

            save_zero(path, write)
            return
        content = {**(extra_ckpt or {}), 'state_dict': self._all_weights()}
        if callback is not None:
            callback(content)
        if is_main_process():
            with atomic_path(path) as part:
                torch.save(content, part)
        barrier()

    def _all_weights(self) -> dict[str, torch.Tensor]:
        """Weights and buffers as they are computed with, in float32."""
        import deepspeed

        module = self.model.module
        divided = list(module.parameters()) if self.stage == 3 else []
        with deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
            return {
                name: as_plain(value)
                for name, value in module.state_dict().items()
            }


def leave_group() -> None:
    """Close what a strategy without a launcher has set up."""
    if is_distributed():
        from deepspeed.comm import destroy_process_group

        destroy_process_group()


def _device() -> str:
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def _backend() -> str:
    return 'nccl' if torch.cuda.is_available() else 'gloo'


def _plain(value: Any) -> Any:
    """Dictionaries and lists of Python's own instead of a config's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _merge_groups(groups: list[dict]) -> list[dict]:
    """Join groups with the same settings; leave out what is frozen.

    mmengine makes a group of every parameter, and ZeRO pads each group.
    """
    merged: list[dict] = []
    for group in groups:
        params = [p for p in group['params'] if p.requires_grad]
        settings = {k: v for k, v in group.items() if k != 'params'}
        if not params:
            continue
        for other in merged:
            if {k: v for k, v in other.items() if k != 'params'} == settings:
                other['params'] += params
                break
        else:
            merged.append({'params': params, **settings})
    return merged
