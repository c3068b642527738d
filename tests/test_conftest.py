# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import torch


def test_uninitialised_memory_is_poisoned():
    assert torch.empty(1000).isnan().all()
    assert (torch.empty(1000, dtype=torch.int64) == 2**63 - 1).all()


def test_seeds_are_fixed():
    assert torch.rand(()) == torch.rand((), generator=seeded())


def seeded():
    return torch.Generator().manual_seed(0)
