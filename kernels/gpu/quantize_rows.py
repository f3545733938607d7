"""See `kernels.quantize_rows`: a program takes some groups of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import rounded
from kernels.quantize_rows import E4M3, E4M3_MAX, E4m3Rows

PIECE = 2048
"""Elements of a program, unless a group has more."""


@triton.jit
def _quantize_rows_kernel(
    rows_ptr,
    codes_ptr,
    scales_ptr,
    row_stride,
    size,
    num_groups,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * G + tl.arange(0, G)
    inner = tl.arange(0, D)
    places = groups[:, None] * GROUP + inner[None, :]
    is_element = (inner < GROUP)[None, :] & (places < size)
    exact = tl.load(rows_ptr + row * row_stride + places, mask=is_element, other=0.0).to(tl.float32)
    scales = tl.max(tl.abs(exact), 1) / LARGEST
    scales = tl.where(scales == 0, 1.0, scales)
    codes = rounded(exact / scales[:, None], codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + places, codes, mask=is_element)
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)


def quantize_rows_triton(rows: torch.Tensor, group_size: int) -> E4m3Rows:
    """`rows` contiguous in the last dimension."""
    num_rows, size = rows.shape
    assert rows.stride(1) == 1
    num_groups = triton.cdiv(size, group_size)
    codes = torch.empty((num_rows, size), dtype=E4M3, device=rows.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=rows.device)
    if num_rows:
        d = triton.next_power_of_2(group_size)
        g = min(max(1, PIECE // d), triton.next_power_of_2(num_groups))
        _quantize_rows_kernel[num_rows, triton.cdiv(num_groups, g)](
            rows,
            codes,
            scales,
            rows.stride(0),
            size,
            num_groups,
            LARGEST=E4M3_MAX,
            GROUP=group_size,
            G=g,
            D=d,
            num_warps=min(16, max(1, g * d // 512)),
        )
    return E4m3Rows(codes=codes, scales=scales)
