from __future__ import annotations

import torch

from kernels.copy_blocks import copy_blocks


def test_destinations_become_their_sources_and_nothing_else_changes() -> None:
    cache = torch.randn(6, 2, 2, 3, 4, 5)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([4, 4, 0]), torch.tensor([1, 5, 3]))
    assert torch.equal(cache, before[[0, 4, 2, 0, 4, 4]])


def test_copying_nothing_changes_nothing() -> None:
    cache = torch.randn(2, 3)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(cache, before)
