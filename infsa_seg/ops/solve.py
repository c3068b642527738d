# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Linear systems, in batches that can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

# Seen with torch 2.13.0 and the MKL that it comes with, on an AMD EPYC with
# AVX2 and two threads: systems of 160 rows and more were solved wrongly, or
# not at all, if several of them were factorised side by side. To be removed
# once tests/ops/test_solve.py passes without it there.
_ALONE_FROM = 96


def solve(matrix: Tensor, value: Tensor) -> Tensor:
    """``matrix^-1 value``, for every matrix of a batch.

    Large systems are solved one after another on a CPU, where each keeps all
    threads busy by itself.

    Args:
        matrix: (..., M, M), invertible.
        value: (..., M, D), of the same or of fewer leading dimensions.
    """
    # In this order: a program is not to be tied to a size.
    alone = (
        not torch.compiler.is_compiling()
        and matrix.device.type == 'cpu'
        and matrix.shape[-1] >= _ALONE_FROM
    )
    if not alone:
        return torch.linalg.solve(matrix, value)
    batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        matrix.shape[:-2], value.shape[:-2]
    )
    matrices = matrix.expand(*batch, *matrix.shape[-2:])
    values = value.expand(*batch, *value.shape[-2:])
    if not batch.numel():
        return torch.linalg.solve(matrices, values)
    solutions = [
        torch.linalg.solve(a, b)
        for a, b in zip(
            matrices.reshape(-1, *matrix.shape[-2:]),
            values.reshape(-1, *value.shape[-2:]),
            strict=True,
        )
    ]
    return torch.stack(solutions).view(values.shape)
