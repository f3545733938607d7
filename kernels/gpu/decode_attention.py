"""See `kernels.decode_attention`. A program takes one KV head of one part ("split") of a sequence's context, for all
queries of that head at once, so that keys and values are read once.

The grid does not depend on the lengths, which only the device knows, so a recorded graph serves every step: how many
tokens a split has follows from the length, and splits that are left over end at once. A fixed `split_size` makes a
sequence's result independent of the batch it is in.
Source: Dao et al. 2023, Flash-Decoding for long-context inference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_tile import LOG2_E, attend_tile, check_paged
from kernels.gpu.precision import rounded

TILE = 64
MIN_ROWS = 16
"""The least a tensor core takes."""
MAX_SPLITS = 64
MIN_SPLIT_TILES = 4
MERGED_AT_ONCE = 16
INVARIANT_SPLIT_SIZE = 8 * TILE
"""Tokens of a part where nothing may depend on the batch: a context of 8,192 keeps 16 programs a KV head busy."""
OPTIONS = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _split_size(span, num_splits, SPLIT_SIZE: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Tokens of one split, whole tiles."""
    if SPLIT_SIZE > 0:
        return SPLIT_SIZE
    return tl.maximum(tl.cdiv(tl.cdiv(span, num_splits), N), MIN_TILES) * N


@triton.jit
def _first_token(seq_len, NUM_QUERIES: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Where a sequence's context begins: a tile's start, at or before what its first query sees."""
    if WINDOW == 0:
        return 0
    return tl.maximum(seq_len - NUM_QUERIES + 1 - WINDOW, 0) // N * N


@triton.jit
def _decode_attention_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    output_ptr,
    partial_ptr,
    lse_ptr,
    query_row_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    table_stride,
    scale_log2,
    soft_cap_log2,
    num_splits,
    scales_ptr,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + sequence)
    first = _first_token(seq_len, NUM_QUERIES, WINDOW, N)
    size = _split_size(seq_len - first, num_splits, SPLIT_SIZE, N, MIN_TILES)
    start = first + split * size
    if split > 0 and start >= seq_len:
        return
    end = tl.minimum(start + size, seq_len)

    rows = tl.arange(0, M)
    columns = tl.arange(0, D)
    is_row = rows < NUM_QUERIES * GROUP
    is_element = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    number, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    query_rows = (sequence * NUM_QUERIES + number).to(tl.int64)
    query = tl.load(
        query_ptr + (query_rows * query_row_stride + head * query_head_stride)[:, None] + columns[None, :],
        mask=is_element,
        other=0.0,
    )
    highest = seq_len - NUM_QUERIES + number
    lowest = highest - WINDOW + 1 if WINDOW > 0 else highest * 0

    if scales_ptr is not None:
        scale_log2 *= tl.load(scales_ptr + kv_head)
    total = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    head_offset = kv_head.to(tl.int64) * kv_head_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    for position in range(start, end, N):
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
            IS_MASKED=NUM_QUERIES > 1 or WINDOW > 0,
        )
    divisor = tl.where(weight == 0, 1.0, weight)  # a row that sees nothing here: its result is 0, its maximum -inf
    attended = total / divisor[:, None]
    if scales_ptr is not None:
        attended *= tl.load(scales_ptr + num_kv_heads + kv_head)
    if not IS_SPLIT:
        places = (query_rows * num_kv_heads * GROUP + head) * HEAD_DIM
        tl.store(
            output_ptr + places[:, None] + columns[None, :],
            rounded(attended, output_ptr.dtype.element_ty),
            mask=is_element,
        )
    else:
        places = (query_rows * num_kv_heads * GROUP + head) * num_splits + split
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + columns[None, :], attended, mask=is_element)
        tl.store(lse_ptr + places, top + tl.log2(divisor), mask=is_row)


@triton.jit
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    output_ptr,
    num_splits,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
):
    """One row of one head: the splits' results by their shares of the whole sum, S of them at a time, so that the order
    of the sum is the same for any number of splits."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row // NUM_QUERIES)
    first = _first_token(seq_len, NUM_QUERIES, WINDOW, N)
    size = _split_size(seq_len - first, num_splits, SPLIT_SIZE, N, MIN_TILES)
    num_used = tl.maximum(tl.cdiv(seq_len - first, size), 1)
    place = (row * tl.num_programs(1) + head) * num_splits
    columns = tl.arange(0, D)

    merged = tl.zeros([D], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    for start in range(0, num_used, S):
        splits = start + tl.arange(0, S)
        is_used = splits < num_used
        lse = tl.load(lse_ptr + place + splits, mask=is_used, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (place + splits)[:, None] * HEAD_DIM + columns[None, :],
            mask=is_used[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(lse - reference)
        shrink = tl.exp2(top - reference)
        merged = merged * shrink + tl.sum(partial * shares[:, None], 0)
        weight = weight * shrink + tl.sum(shares, 0)
        top = new_top
    merged = merged / tl.where(weight == 0, 1.0, weight)
    tl.store(
        output_ptr + row * tl.num_programs(1) * HEAD_DIM + head * HEAD_DIM + columns,
        rounded(merged, output_ptr.dtype.element_ty),
        mask=columns < HEAD_DIM,
    )


def decode_attention_triton(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    soft_cap: float | None = None,
    num_queries: int = 1,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> torch.Tensor:
    """Attend from `query` [num_seqs * num_queries, num_heads, head_dim], whose last dimension is contiguous.

    Args:
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`.
        num_queries: new tokens of every sequence, the last of its `seq_lens`; a length of 0 gives zeros.
        num_splits: parts of a context that are worked on at the same time; None fills the chip.
        split_size: tokens of a part, a multiple of TILE; there are as many as block tables have room for, and what
            a sequence gets does not depend on the batch.
    """
    num_rows, num_heads, head_dim = query.shape
    num_seqs, max_blocks = block_tables.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert num_rows == num_seqs * num_queries
    assert len(seq_lens) == num_seqs
    check_paged(query, k_cache, v_cache, block_tables, kv_scales)
    assert split_size is None or split_size % TILE == 0
    max_context = max_blocks * block_size
    if split_size is not None:
        num_splits = triton.cdiv(max_context, split_size)
    elif num_splits is None:
        num_splits = _num_splits(num_seqs * num_kv_heads, max_context, query.device)
    group = num_heads // num_kv_heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = (num_rows, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    if num_seqs == 0:
        return output
    common = {
        "NUM_QUERIES": num_queries,
        "HEAD_DIM": head_dim,
        "WINDOW": sliding_window or 0,
        "SPLIT_SIZE": split_size or 0,
        "MIN_TILES": MIN_SPLIT_TILES,
        "N": TILE,
        "D": triton.next_power_of_2(head_dim),
    }
    _decode_attention_kernel[num_seqs, num_kv_heads, num_splits](
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        output,
        partial,
        lse,
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        scale * LOG2_E,
        (soft_cap or 0.0) * LOG2_E,
        num_splits,
        kv_scales,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HAS_SOFT_CAP=soft_cap is not None,
        IS_SPLIT=num_splits > 1,
        M=max(MIN_ROWS, triton.next_power_of_2(num_queries * group)),
        **common,
        **OPTIONS,
    )
    if num_splits > 1:
        _merge_splits_kernel[num_rows, num_heads](
            partial, lse, seq_lens, output, num_splits, S=MERGED_AT_ONCE, **common
        )
    return output


def _num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """As many as fill the chip twice over, each of some tiles."""
    if device.type == "cuda":
        num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        num_processors = 1
    wanted = -(-2 * num_processors // num_programs)
    return max(1, min(wanted, -(-max_context // (MIN_SPLIT_TILES * TILE)), MAX_SPLITS))
