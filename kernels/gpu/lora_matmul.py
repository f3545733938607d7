"""See `kernels.lora_matmul`. Rows are sorted by adapter, shrunk to its rank, and expanded on top of the base product.

A rank is too few columns to fill a chip, so the inputs are cut into splits, whose sums the expansion adds in their
order. How many follows from the number of inputs and the rows of a tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.gpu.grouped_rows import RowGroups, TileShape, choose_shape, gathered_product, group_rows, tile_and_block
from kernels.gpu.precision import dot, rounded

SHAPES = (
    TileShape(rows=16, outputs=64, row_bytes=256, num_warps=4, num_stages=3),
    TileShape(rows=64, outputs=128, row_bytes=128, num_warps=8, num_stages=3),
)
MAX_RANKS = 64
"""Of a program: columns that it shrinks to, and that it expands from at a time."""
SPLIT_SIZE = 512
"""The least."""
MAX_SPLITS = {16: 8, 64: 2}
"""Of a tile's rows: where there are many, they fill a chip by themselves."""
EXPAND_STAGES = 1
"""The loads of all splits are under way at once as it is; in shared memory there is no room for them."""


@triton.jit
def _shrink_kernel(
    rows_ptr,
    lora_a_ptr,
    tokens_ptr,
    tile_adapters_ptr,
    shrunk_ptr,
    num_tiles,
    row_stride,
    split_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One split of a tile of tokens, N of the ranks of all slices, float32."""
    tile, block = tile_and_block(tl.program_id(0), num_tiles, tl.cdiv(NUM_RANKS, N), BAND)
    split = tl.program_id(1)
    adapter = tl.load(tile_adapters_ptr + tile)
    if adapter < 0:
        return
    tokens = tl.load(tokens_ptr + tile.to(tl.int64) * M + tl.arange(0, M))
    is_token = tokens >= 0
    tokens = tl.where(is_token, tokens, 0).to(tl.int64)
    ranks = block * N + tl.arange(0, N)
    matrix_ptr = lora_a_ptr + adapter.to(tl.int64) * (NUM_RANKS * NUM_INPUTS)
    shrunk = gathered_product(
        rows_ptr + tokens * row_stride,
        is_token,
        matrix_ptr + ranks.to(tl.int64) * NUM_INPUTS,
        ranks < NUM_RANKS,
        split * SPLIT_SIZE,
        tl.minimum(split * SPLIT_SIZE + SPLIT_SIZE, NUM_INPUTS),
        M,
        N,
        K,
    )
    places = split.to(tl.int64) * split_stride + tokens[:, None] * NUM_RANKS + ranks[None, :]
    tl.store(shrunk_ptr + places, shrunk, mask=is_token[:, None] & (ranks < NUM_RANKS)[None, :])


@triton.jit
def _expand_kernel(
    shrunk_ptr,
    lora_b_ptr,
    scalings_ptr,
    tokens_ptr,
    tile_adapters_ptr,
    output_ptr,
    num_tiles,
    split_stride,
    output_stride,
    RANK: tl.constexpr,
    SLICE_ENDS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """N outputs of a tile of tokens: the splits' sum, rounded, times B of the slices that the outputs are in."""
    num_slices: tl.constexpr = len(SLICE_ENDS)
    num_outputs: tl.constexpr = SLICE_ENDS[num_slices - 1]
    num_ranks: tl.constexpr = num_slices * RANK
    tile, block = tile_and_block(tl.program_id(0), num_tiles, tl.cdiv(num_outputs, N), BAND)
    adapter = tl.load(tile_adapters_ptr + tile)
    if adapter < 0:
        return
    tokens = tl.load(tokens_ptr + tile.to(tl.int64) * M + tl.arange(0, M))
    is_token = tokens >= 0
    tokens = tl.where(is_token, tokens, 0).to(tl.int64)
    outputs = block * N + tl.arange(0, N)
    is_output = outputs < num_outputs
    slices = tl.zeros([N], tl.int32)
    for number in tl.static_range(num_slices - 1):
        slices += (outputs >= SLICE_ENDS[number]).to(tl.int32)
    matrix_ptr = lora_b_ptr + adapter.to(tl.int64) * (num_outputs * RANK)
    weight_ptrs = matrix_ptr + outputs.to(tl.int64) * RANK

    total = tl.zeros([M, N], tl.float32)
    for start in range(tl.min(slices, 0) * RANK, (tl.max(slices, 0) + 1) * RANK, K):
        ranks = start + tl.arange(0, K)
        shrunk_ptrs = shrunk_ptr + tokens[:, None] * num_ranks + ranks[None, :]
        is_shrunk = is_token[:, None] & (ranks < num_ranks)[None, :]
        shrunk = tl.zeros([M, K], tl.float32)
        for _ in tl.static_range(NUM_SPLITS):
            shrunk += tl.load(shrunk_ptrs, mask=is_shrunk, other=0.0)
            shrunk_ptrs += split_stride
        own = ranks[:, None] - slices[None, :] * RANK
        is_weight = (own >= 0) & (own < RANK) & is_output[None, :]
        weights = tl.load(weight_ptrs[None, :] + own, mask=is_weight, other=0.0)
        total += dot(rounded(shrunk, weights.dtype), weights)

    places = tokens[:, None] * output_stride + outputs[None, :]
    is_place = is_token[:, None] & is_output[None, :]
    base = tl.load(output_ptr + places, mask=is_place, other=0.0).to(tl.float32)
    added = base + total * tl.load(scalings_ptr + adapter)
    tl.store(output_ptr + places, rounded(added, output_ptr.dtype.element_ty), mask=is_place)


def lora_matmul_triton(
    output: torch.Tensor,
    rows: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    adapter_ids: torch.Tensor,
    scalings: torch.Tensor,
    slice_sizes: Sequence[int] | None = None,
    *,
    groups: RowGroups | None = None,
) -> torch.Tensor:
    """Rows contiguous in the last dimension, matrices contiguous.

    Args:
        groups: what `group_by_adapter` gives, where the caller has it of another projection of the same tokens.
    """
    num_tokens, num_inputs = rows.shape
    num_adapters, num_outputs, rank = lora_b.shape
    slice_ends = tuple(itertools.accumulate(slice_sizes or (num_outputs,)))
    num_ranks = len(slice_ends) * rank
    assert slice_ends[-1] == num_outputs
    assert lora_a.shape == (num_adapters, num_ranks, num_inputs)
    assert lora_a.dtype == rows.dtype
    assert lora_a.is_contiguous()
    assert lora_b.is_contiguous()
    assert scalings.shape == (num_adapters,)
    assert scalings.dtype == torch.float32
    assert output.shape == (num_tokens, num_outputs)
    assert len(adapter_ids) == num_tokens
    assert rows.stride(1) == output.stride(1) == 1
    if num_tokens == 0:
        return output
    groups = group_by_adapter(adapter_ids, num_adapters) if groups is None else groups
    shape = next(shape for shape in SHAPES if shape.rows == groups.tile_rows)
    split_size = _split_size(num_inputs, shape.rows)
    num_splits = triton.cdiv(num_inputs, split_size)
    shrunk = torch.empty((num_splits, num_tokens, num_ranks), dtype=torch.float32, device=rows.device)
    constants = shape.constants(rows.element_size())
    columns = _num_columns(num_ranks)
    _shrink_kernel[groups.num_tiles * triton.cdiv(num_ranks, columns), num_splits](
        rows,
        lora_a,
        groups.rows,
        groups.tile_groups,
        shrunk,
        groups.num_tiles,
        rows.stride(0),
        shrunk.stride(0),
        NUM_INPUTS=num_inputs,
        NUM_RANKS=num_ranks,
        SPLIT_SIZE=split_size,
        **(constants | {"N": columns}),
        **shape.options,
    )
    _expand_kernel[groups.num_tiles * triton.cdiv(num_outputs, shape.outputs),](
        shrunk,
        lora_b,
        scalings,
        groups.rows,
        groups.tile_groups,
        output,
        groups.num_tiles,
        shrunk.stride(0),
        output.stride(0),
        RANK=rank,
        SLICE_ENDS=slice_ends,
        NUM_SPLITS=num_splits,
        **(constants | {"K": _num_columns(rank)}),
        **(shape.options | {"num_stages": EXPAND_STAGES}),
    )
    return output


def group_by_adapter(adapter_ids: torch.Tensor, num_adapters: int) -> RowGroups:
    """Tokens by adapter, those without one in no tile; serves every projection of a step."""
    return group_rows(adapter_ids, num_adapters, choose_shape(SHAPES, len(adapter_ids), num_adapters).rows)


def _split_size(num_inputs: int, tile_rows: int) -> int:
    return SPLIT_SIZE * -(-num_inputs // (SPLIT_SIZE * MAX_SPLITS[tile_rows]))


def _num_columns(num_ranks: int) -> int:
    """A power of two that a tensor core takes."""
    return next((columns for columns in (16, 32) if num_ranks <= columns), MAX_RANKS)
