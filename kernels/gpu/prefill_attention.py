"""See `kernels.prefill_attention`. A program takes one KV head of a tile of a sequence's new tokens, with the queries
of all heads that share it, and reads the context once for them: first the tokens that every row sees, without a mask,
then those on the diagonal.

Which tile a program has follows from `cu_seqlens_q` on the device: sequence i's tiles begin at number
`cu_seqlens_q[i] // queries of a tile + i`, so there are enough numbers for all and at most one left over a sequence.
Source: Dao 2023, FlashAttention-2, section 3; Ainslie et al. 2023, GQA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_tile import LOG2_E, attend_tile, check_paged
from kernels.gpu.precision import rounded
from kernels.gpu.target import options

ROWS = 128
TILE = 64
OPTIONS = {"num_warps": 8, "num_stages": 3}
"""Four warps spill."""
AMD_OPTIONS = {"num_warps": 4, "num_stages": 2}
"""Eight warps of 64 threads share the registers, 256 each, and spill."""


@triton.jit
def _sequence_of(tile, cu_seqlens_ptr, num_seqs, NUM_QUERIES: tl.constexpr):
    """The last sequence whose tiles begin at or before `tile`, by halving."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_ptr + middle) // NUM_QUERIES + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low


@triton.jit
def _prefill_attention_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    output_ptr,
    num_seqs,
    query_row_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    table_stride,
    scale_log2,
    soft_cap_log2,
    scales_ptr,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    sequence = _sequence_of(tile, cu_seqlens_ptr, num_seqs, NUM_QUERIES)
    first_row = tl.load(cu_seqlens_ptr + sequence)
    num_new = tl.load(cu_seqlens_ptr + sequence + 1) - first_row
    first_query = (tile - first_row // NUM_QUERIES - sequence) * NUM_QUERIES
    if first_query >= num_new:
        return
    first_position = tl.load(seq_lens_ptr + sequence) - num_new + first_query

    rows = tl.arange(0, M)
    columns = tl.arange(0, D)
    number, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (number < NUM_QUERIES) & (first_query + number < num_new)
    is_element = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    query_rows = (first_row + first_query + number).to(tl.int64)
    query = tl.load(
        query_ptr + (query_rows * query_row_stride + head * query_head_stride)[:, None] + columns[None, :],
        mask=is_element,
        other=0.0,
    )
    highest = first_position + number
    lowest = highest - WINDOW + 1 if WINDOW > 0 else highest * 0

    if scales_ptr is not None:
        scale_log2 *= tl.load(scales_ptr + kv_head)
    total = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    head_offset = kv_head.to(tl.int64) * kv_head_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    end = first_position + tl.minimum(NUM_QUERIES, num_new - first_query)
    diagonal = (first_position + 1) // N * N
    start = tl.maximum(first_position - WINDOW + 1, 0) // N * N if WINDOW > 0 else 0
    for is_diagonal in tl.static_range(2):  # first what every row sees
        first_tile = tl.maximum(start, diagonal) if is_diagonal else start
        for position in range(first_tile, end if is_diagonal else diagonal, N):
            total, top, weight = attend_tile(
                query,
                total,
                top,
                weight,
                k_ptr + head_offset,
                v_ptr + head_offset,
                table_ptr,
                block_stride,
                position + tl.arange(0, N),
                end,
                lowest,
                highest,
                scale_log2,
                soft_cap_log2,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_DIM=HEAD_DIM,
                D=D,
                HAS_SOFT_CAP=HAS_SOFT_CAP,
                IS_MASKED=is_diagonal or WINDOW > 0,
            )
    places = (query_rows * num_heads + head) * HEAD_DIM
    attended = total / tl.where(weight == 0, 1.0, weight)[:, None]  # rows of no query
    if scales_ptr is not None:
        attended *= tl.load(scales_ptr + tl.num_programs(1) + kv_head)
    tl.store(
        output_ptr + places[:, None] + columns[None, :], rounded(attended, output_ptr.dtype.element_ty), mask=is_element
    )


def prefill_attention_triton(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend from `query` [num_tokens, num_heads, head_dim], whose last dimension is contiguous.

    Args:
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = len(seq_lens)
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert len(cu_seqlens_q) == num_seqs + 1
    assert len(block_tables) == num_seqs
    check_paged(query, k_cache, v_cache, block_tables, kv_scales)
    group = num_heads // num_kv_heads
    num_rows = max(ROWS, triton.next_power_of_2(group))
    queries_per_tile = num_rows // group
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    _prefill_attention_kernel[num_tokens // queries_per_tile + num_seqs, num_kv_heads](
        query,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        output,
        num_seqs,
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        scale * LOG2_E,
        (soft_cap or 0.0) * LOG2_E,
        kv_scales,
        NUM_QUERIES=queries_per_tile,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        HAS_SOFT_CAP=soft_cap is not None,
        M=num_rows,
        N=TILE,
        D=triton.next_power_of_2(head_dim),
        **options(OPTIONS, AMD_OPTIONS),
    )
    return output
