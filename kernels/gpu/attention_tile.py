"""One step of a flash attention over a paged cache: a tile of tokens read once for all rows of queries.

Scores are kept in units of log2, so that `exp2` serves; the maximum of a row that has seen nothing is minus infinity.
Source: Dao 2023, FlashAttention-2, section 3.1; Kwon et al. 2023, PagedAttention, section 4.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.gpu.precision import dot, rounded, widened

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(
    query,
    total,
    top,
    weight,
    k_ptr,
    v_ptr,
    table_ptr,
    block_stride,
    positions,
    end,
    lowest,
    highest,
    scale_log2,
    soft_cap_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Fold the tokens at `positions` [N] into the state of all rows.

    Args:
        query: [M, D], zeros beyond HEAD_DIM.
        total, top, weight: the state: [M, D] weighted values, [M] maximum, [M] sum of weights, all float32.
        k_ptr, v_ptr: of one KV head; a block's tile [BLOCK_SIZE, HEAD_DIM] is contiguous, blocks `block_stride` apart.
        table_ptr: the sequence's blocks.
        end: positions from here on are not read.
        lowest, highest: [M], what a row sees where IS_MASKED, both included.
    """
    is_there = positions < end
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
    places = blocks * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM
    columns = tl.arange(0, D)
    is_column = columns < HEAD_DIM

    keys = tl.load(k_ptr + places[None, :] + columns[:, None], mask=is_there[None, :] & is_column[:, None], other=0.0)
    if keys.dtype != query.dtype:
        keys = widened(keys, query.dtype)
    scores = dot(query, keys) * scale_log2
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), which is right at both infinities, too.
        scores = soft_cap_log2 - 2 * soft_cap_log2 / (1 + tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap_log2)))
    is_seen = is_there[None, :]
    if IS_MASKED:
        is_seen = is_seen & (positions[None, :] >= lowest[:, None]) & (positions[None, :] <= highest[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    shares = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(top - reference)
    weight = weight * shrink + tl.sum(shares, 1)

    values = tl.load(v_ptr + places[:, None] + columns[None, :], mask=is_there[:, None] & is_column[None, :], other=0.0)
    if values.dtype == tl.float8e4nv:  # weights of four bits would be too coarse
        values = widened(values, query.dtype)
    total = total * shrink[:, None] + dot(rounded(shares, values.dtype), values)
    return total, new_top, weight


def check_paged(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """What both attention kernels take for granted of shapes and strides."""
    head_dim = query.shape[2]
    assert query.shape[1] % k_cache.shape[1] == 0
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[3] == head_dim
    assert query.stride(2) == 1
    assert block_tables.stride(1) == 1
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[2:] == (head_dim, 1)
    check_scales(k_cache, kv_scales)


def check_scales(k_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """A cache of float8 has them, and no other."""
    assert (k_cache.dtype == FLOAT8) == (kv_scales is not None)
    assert kv_scales is None or (kv_scales.shape == (2, k_cache.shape[1]) and kv_scales.is_contiguous())
