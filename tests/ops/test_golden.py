# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Parity with recorded outputs of the reference implementation."""

import numpy as np
import pytest
import torch

from infsa_seg.ops import linear, reference


@pytest.mark.parametrize('case', ['case0', 'case1'])
@pytest.mark.parametrize('discount', [0.5, 0.95])
def test_functional(shared, case, discount):
    """Largest difference 1e-6, float32."""
    golden = np.load(shared / 'golden' / 'functional.npz')
    q, k, v = (torch.from_numpy(golden[f'{case}/{x}']) for x in 'qkv')

    def expect(variant, name, result):
        recorded = golden[f'{case}/rho{discount}/{variant}/{name}']
        assert np.abs(result.numpy() - recorded).max() <= 1e-6

    output, scores = reference.pure_infsa(q, k, v, discount)
    expect('pure_infsa', 'output', output)
    expect('pure_infsa', 'scores', scores)
    output, scores = reference.linear_infsa(q, k, v, discount)
    expect('linear_infsa', 'output', output)
    expect('linear_infsa', 'scores', scores)
    for num_chunks in (1, 3):
        output = linear.linear_infsa(q, k, v, discount, None, num_chunks)
        expect('linear_infsa', 'output', output)
