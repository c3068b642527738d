# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from infsa_seg.ops.solve import solve


def system(batch, size, dtype):
    noise = torch.rand(*batch, size, size, dtype=dtype)
    return torch.eye(size, dtype=dtype) - 0.5 * noise / size


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('size', [1, 30, 95, 96, 128, 160, 182, 300])
def test_every_system_of_a_batch(size, dtype):
    """What comes out fits what went in; 1e-5 and 1e-12."""
    for _ in range(3):
        matrix = system((2, 3), size, dtype)
        value = torch.randn(2, 3, size, 4, dtype=dtype)
        torch.testing.assert_close(
            matrix @ solve(matrix, value),
            value,
            rtol=0,
            atol=1e-5 if dtype == torch.float32 else 1e-12,
        )


def test_leading_dimensions():
    for batch, other in (((), ()), ((2, 1), (3,)), ((0,), (0,)), ((2,), (2,))):
        matrix = system(batch, 100, torch.float64)
        value = torch.randn(*other, 100, 2, dtype=torch.float64)
        expected = torch.linalg.inv(matrix) @ value
        torch.testing.assert_close(solve(matrix, value), expected)


def test_gradients():
    matrix = system((2,), 96, torch.float64)[..., :96, :96].requires_grad_()
    value = torch.randn(2, 96, 1, dtype=torch.float64, requires_grad=True)
    (solve(matrix, value) ** 2).sum().backward()
    alone = [x.grad.clone() for x in (matrix, value)]
    matrix.grad = value.grad = None
    (torch.linalg.inv(matrix) @ value).pow(2).sum().backward()
    for one, other in zip(alone, (matrix.grad, value.grad), strict=True):
        torch.testing.assert_close(one, other)
