# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from infsa_seg.ops import reference
from infsa_seg.ops.linear import (
    ScoreState,
    mean_query,
    read_scores,
    score_keys,
    sum_energy,
    sum_scores,
)
from infsa_seg.ops.state import State


@dataclasses.dataclass
class Sums(State):
    a: Tensor
    b: Tensor | None = None


def test_zeros_are_the_identity_of_merge():
    state = Sums(torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    zero = Sums(torch.zeros(2), torch.zeros(1))
    merged = zero.merge(state)
    torch.testing.assert_close(merged.a, state.a)
    torch.testing.assert_close(merged.b, state.b)
    assert zero.a.sum() == 0


def test_merge_refuses_different_sums():
    with pytest.raises(ValueError, match=r"one part has the sums \['a'\]"):
        Sums(torch.zeros(2)).merge(Sums(torch.zeros(2), torch.zeros(1)))


def test_nbytes_and_to_skip_what_is_not_kept():
    state = Sums(torch.zeros(4))
    assert state.nbytes == 16
    assert state.to(torch.float64).nbytes == 32
    assert state.to(torch.float64).b is None


def test_all_reduce_without_group_is_the_identity():
    state = Sums(torch.ones(2))
    assert state.all_reduce() is state


def _half_of_the_tokens(rank: int, store: str, result: str) -> None:
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{store}', rank=rank, world_size=2
    )
    q, k, v = _tokens()
    mine = slice(None, 4) if rank == 0 else slice(4, None)
    q, k, v = (x[..., mine, :].clone().requires_grad_() for x in (q, k, v))
    query = mean_query(sum_energy(q, q).all_reduce())
    state: ScoreState = sum_scores(score_keys(k, query), v).all_reduce()
    context = read_scores(state, 0.7)
    # Each rank's loss is its own part of the sum over all tokens.
    loss = (context**2).sum() * q.shape[-2]
    loss.backward()
    torch.save([context.detach(), q.grad, k.grad, v.grad], f'{result}{rank}')
    torch.distributed.destroy_process_group()


def _tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=generator) + 0.5
        for _ in range(3)
    ]


def test_all_reduce_over_two_ranks(tmp_path):
    """Forward and gradients equal one process; 1e-10, float64."""
    result = str(tmp_path / 'rank')
    mp.spawn(_half_of_the_tokens, (str(tmp_path / 'store'), result), nprocs=2)
    ranks = [torch.load(f'{result}{rank}') for rank in range(2)]
    q, k, v = (x.requires_grad_() for x in _tokens())
    expected, _ = reference.linear_infsa(q, k, v, 0.7)
    (expected**2).sum().backward()
    for rank in ranks:
        torch.testing.assert_close(
            rank[0], expected[:, :, 0], rtol=0, atol=1e-10
        )
    for i, leaf in enumerate((q, k, v)):
        grad = torch.cat([rank[i + 1] for rank in ranks], -2)
        torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=1e-10)
