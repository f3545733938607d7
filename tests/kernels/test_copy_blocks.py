from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.gpu.copy_blocks import PIECE_BYTES, copy_rows_triton

SIZES = [1, 6, 12, 40, PIECE_BYTES - 16, PIECE_BYTES + 8]
GUARD = 0xA5
IDS = torch.tensor([4, 0, 5])


def copy_triton(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    copy_rows_triton(cache, sources, cache, destinations)


def gather_triton(cache: torch.Tensor, sources: torch.Tensor, staging: torch.Tensor) -> None:
    copy_rows_triton(cache, sources, staging, None)


def scatter_triton(staging: torch.Tensor, cache: torch.Tensor, destinations: torch.Tensor) -> None:
    copy_rows_triton(staging, None, cache, destinations)


def guarded(num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows [num_rows, size], and the memory around them: 16 bytes of guard on both sides."""
    whole = torch.full((16 + num_rows * size + 16,), GUARD, dtype=torch.uint8)
    rows = whole[16:-16].view(num_rows, size)
    rows.random_(0, 256)
    return rows, whole


def guards_are_whole(whole: torch.Tensor) -> bool:
    return bool((torch.cat((whole[:16], whole[-16:])) == GUARD).all())


def test_destinations_become_their_sources_and_nothing_else_changes() -> None:
    cache = torch.randn(6, 2, 2, 3, 4, 5)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([4, 4, 0]), torch.tensor([1, 5, 3]))
    assert torch.equal(cache, before[[0, 4, 2, 0, 4, 4]])


@pytest.mark.parametrize("copy", [copy_blocks, copy_triton])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_any_size_are_copied(copy: Callable[..., None], size: int) -> None:
    cache, whole = guarded(6, size)
    before = cache.clone()
    copy(cache, torch.tensor([4, 4, 0]), torch.tensor([1, 5, 3]))
    assert torch.equal(cache, before[[0, 4, 2, 0, 4, 4]])
    assert guards_are_whole(whole)


@pytest.mark.parametrize(
    ("gather", "scatter"), [(gather_blocks, scatter_blocks), (gather_triton, scatter_triton)], ids=["torch", "triton"]
)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_gathered_and_scattered_is_back_in_its_place(
    gather: Callable[..., None], scatter: Callable[..., None], size: int
) -> None:
    (cache, whole), (staging, staged) = guarded(7, size), guarded(3, size)
    before = cache.clone()
    gather(cache, IDS, staging)
    assert torch.equal(staging, before[IDS])
    assert torch.equal(cache, before)
    cache[IDS] = 0
    scatter(staging, cache, IDS)
    assert torch.equal(cache, before)
    assert guards_are_whole(whole)
    assert guards_are_whole(staged)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int8], ids=str)
def test_a_cache_of_any_dtype_is_bytes(dtype: torch.dtype) -> None:
    cache = torch.randn(6, 2, 3, 4).to(dtype)
    staging = torch.empty(3, 2 * 3 * 4 * dtype.itemsize, dtype=torch.uint8)
    gather_blocks(cache, IDS, staging)
    assert torch.equal(staging.view(dtype).view(3, 2, 3, 4).float(), cache[IDS].float())


@pytest.mark.parametrize("copy", [copy_blocks, copy_triton])
def test_copying_nothing_changes_nothing(copy: Callable[..., None]) -> None:
    cache, _ = guarded(2, 3)
    before = cache.clone()
    copy(cache, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(cache, before)
