"""Copy whole blocks of the paged cache, all layers at once: onto others, into a contiguous staging buffer, and back.

Shapes: cache [num_blocks, ...], contiguous and block-major, so that one block is one slab; staging [num_copies,
block_bytes] uint8, contiguous; sources, destinations [num_copies] int64; all on one device. No destination is there
twice, and none is also a source. What is copied to is mutated. Nothing waits for the device.
"""

from __future__ import annotations

import torch


def copy_blocks_reference(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Plain torch."""
    rows = _rows(cache)
    rows[destinations] = rows[sources]


def gather_blocks_reference(cache: torch.Tensor, sources: torch.Tensor, staging: torch.Tensor) -> None:
    """Plain torch."""
    torch.index_select(_rows(cache), 0, sources, out=staging)


def scatter_blocks_reference(staging: torch.Tensor, cache: torch.Tensor, destinations: torch.Tensor) -> None:
    """Plain torch."""
    _rows(cache).index_copy_(0, destinations, staging)


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """`cache` as [num_blocks, block_bytes] uint8."""
    return cache.view(len(cache), -1).view(torch.uint8)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy block `sources[i]` of `cache` onto block `destinations[i]`."""
    if cache.is_cuda:
        from kernels.gpu.copy_blocks import copy_rows_triton

        rows = _rows(cache)
        copy_rows_triton(rows, sources, rows, destinations)
    else:
        copy_blocks_reference(cache, sources, destinations)


def gather_blocks(cache: torch.Tensor, sources: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy block `sources[i]` of `cache` to row i of `staging`."""
    if cache.is_cuda:
        from kernels.gpu.copy_blocks import copy_rows_triton

        copy_rows_triton(_rows(cache), sources, staging, None)
    else:
        gather_blocks_reference(cache, sources, staging)


def scatter_blocks(staging: torch.Tensor, cache: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy row i of `staging` onto block `destinations[i]` of `cache`."""
    if cache.is_cuda:
        from kernels.gpu.copy_blocks import copy_rows_triton

        copy_rows_triton(staging, None, _rows(cache), destinations)
    else:
        scatter_blocks_reference(staging, cache, destinations)
