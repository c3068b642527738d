# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed may keep in host memory or on a disk, and what not."""

from __future__ import annotations

from typing import Any

# The first stage in which each of them has an effect.
_FIRST = {'offload_optimizer': 1, 'offload_param': 3}


def check_offload(zero: dict[str, Any], stage: int) -> None:
    """Refuse what DeepSpeed would ignore, or fail at much later.

    Args:
        zero (dict): The section ``zero_optimization`` of its configuration.
        stage (int): Of ZeRO.

    Raises:
        ValueError: A setting has no effect in this stage, or what NVMe needs
            is missing.
    """
    for name, first in _FIRST.items():
        offload = zero.get(name) or {}
        device = offload.get('device', 'none')
        if device == 'none':
            continue
        if device == 'nvme':
            first = 3
        if stage < first:
            raise ValueError(
                f'zero_optimization.{name}.device={device!r} is without '
                f'effect in stage {stage}; set stage={first}, or another '
                'device'
            )
        if device == 'nvme':
            _check_nvme(name, offload)


def _check_nvme(name: str, offload: dict[str, Any]) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not offload.get('nvme_path'):
        raise ValueError(
            f'zero_optimization.{name}: say nvme_path, a folder on the disk'
        )
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ValueError(
            f"zero_optimization.{name}.device='nvme' needs DeepSpeed's "
            'async_io, which is compiled on use: install a C++ compiler and '
            "libaio with its headers, or use device='cpu'"
        )
