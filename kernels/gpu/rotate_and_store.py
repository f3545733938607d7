"""See `kernels.rotate_and_store`. A program takes one head of one token: norm and rotation of a query in place, the
same of a key and then its copy to the cache, of a value the copy alone.

The rotation pairs elements half of `rotary_dim` apart, so a head is read as it is and once more by its pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_tile import check_scales
from kernels.gpu.precision import as_float8, rounded


@triton.jit
def _normed(values, weight, dtype: tl.constexpr):
    """Rounded before the weight and after, as `rms_norm` is; float32."""
    return rounded(rounded(values, dtype).to(tl.float32) * weight, dtype).to(tl.float32)


@triton.jit
def _rotate_and_store_kernel(
    rows_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    row_stride,
    block_stride,
    kv_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    D: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, D)
    is_column = columns < HEAD_DIM
    head_ptr = rows_ptr + token * row_stride + head * HEAD_DIM
    dtype = rows_ptr.dtype.element_ty
    exact = tl.load(head_ptr + columns, mask=is_column, other=0.0).to(tl.float32)

    if head < NUM_HEADS + NUM_KV_HEADS:
        half: tl.constexpr = ROTARY_DIM // 2
        is_turned = columns < ROTARY_DIM
        is_first = columns < half
        partners = tl.where(is_first, columns + half, columns - half)
        partner = tl.load(head_ptr + partners, mask=is_turned, other=0.0).to(tl.float32)
        if HAS_NORMS:
            norm_ptr = query_norm_ptr if head < NUM_HEADS else key_norm_ptr
            scale = tl.rsqrt(tl.sum(exact * exact, 0) / HEAD_DIM + eps)
            weight = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
            partner_weight = tl.load(norm_ptr + partners, mask=is_turned, other=0.0).to(tl.float32)
            exact = _normed(exact * scale, weight, dtype)
            partner = _normed(partner * scale, partner_weight, dtype)
        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM + columns % half
        cos = tl.load(angle_ptr, mask=is_turned, other=1.0)
        sin = tl.load(angle_ptr + half, mask=is_turned, other=0.0)
        exact = exact * cos + tl.where(is_first, -partner, partner) * sin
        tl.debug_barrier()  # every thread has read its pairs before any is overwritten
        tl.store(head_ptr + columns, rounded(exact, dtype), mask=is_column)

    slot = tl.load(slots_ptr + token)
    if head >= NUM_HEADS and slot >= 0:
        is_key = head < NUM_HEADS + NUM_KV_HEADS
        kv_head = tl.where(is_key, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
        place = slot // BLOCK_SIZE * block_stride + kv_head * kv_head_stride + slot % BLOCK_SIZE * HEAD_DIM
        exact = rounded(exact, dtype).to(tl.float32)
        if scales_ptr is None:
            stored = rounded(exact, k_ptr.dtype.element_ty)
        else:
            stored = as_float8(tl.div_rn(exact, tl.load(scales_ptr + head - NUM_HEADS)))
        if is_key:
            tl.store(k_ptr + place + columns, stored, mask=is_column)
        else:
            tl.store(v_ptr + place + columns, stored, mask=is_column)


def rotate_and_store_triton(
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rows` contiguous in the last dimension; positions, slots int64."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_heads = rows.shape[1] // head_dim - 2 * num_kv_heads
    assert rows.stride(1) == 1
    assert cos_sin.is_contiguous()
    assert cos_sin.shape[1] <= head_dim
    assert positions.dtype == slots.dtype == torch.int64
    assert len(positions) == len(slots) == len(rows)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[2:] == (head_dim, 1)
    check_scales(k_cache, kv_scales)
    query_norm, key_norm = (cos_sin, cos_sin) if norms is None else norms
    if len(rows):
        _rotate_and_store_kernel[len(rows), num_heads + 2 * num_kv_heads](
            rows,
            positions,
            slots,
            cos_sin,
            query_norm,
            key_norm,
            k_cache,
            v_cache,
            kv_scales,
            rows.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=cos_sin.shape[1],
            BLOCK_SIZE=block_size,
            HAS_NORMS=norms is not None,
            D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return rows
