# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Where autocast has to keep out."""

from __future__ import annotations

import contextlib

import torch


def no_autocast(
    device: torch.device,
) -> contextlib.AbstractContextManager[object]:
    """Keep the sums in their own dtype inside an autocast region."""
    if not torch.amp.is_autocast_available(device.type):  # such as meta
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
