"""See `kernels.rms_norm` and `kernels.add_rms_norm`: a program takes a row, which may be one of those that indices
name, or be added to a residual first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import rounded


@triton.jit
def _rms_norm_kernel(
    hidden_ptr,
    weight_ptr,
    indices_ptr,
    residual_ptr,
    output_ptr,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row if indices_ptr is None else tl.load(indices_ptr + row).to(tl.int64)
    columns = tl.arange(0, D)
    is_column = columns < SIZE
    dtype = output_ptr.dtype.element_ty
    exact = tl.load(hidden_ptr + source * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        sum_ptr = residual_ptr + row * SIZE + columns
        exact = rounded(exact + tl.load(sum_ptr, mask=is_column, other=0.0).to(tl.float32), dtype).to(tl.float32)
        tl.store(sum_ptr, rounded(exact, dtype), mask=is_column)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    # Rounded before the weight, as the models were trained.
    tl.store(
        output_ptr + row * SIZE + columns,
        rounded(rounded(normed, dtype).to(tl.float32) * weight, dtype),
        mask=is_column,
    )


def rms_norm_triton(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    indices: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hidden` [..., size], rows of one stride, last dimension contiguous; with `indices`, or a contiguous `residual`
    that it is added to, [num_rows, size]."""
    size = hidden.shape[-1]
    rows = hidden if hidden.ndim == 2 else hidden.reshape(-1, size)
    assert rows.stride(1) == 1
    assert weight.shape == (size,)
    assert weight.is_contiguous()
    if residual is not None:
        assert indices is None
        assert residual.shape == hidden.shape == rows.shape
        assert residual.dtype == hidden.dtype
        assert residual.is_contiguous()
    num_rows = len(rows) if indices is None else len(indices)
    output = torch.empty((num_rows, size), dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        d = triton.next_power_of_2(size)
        _rms_norm_kernel[num_rows,](
            rows,
            weight,
            indices,
            residual,
            output,
            rows.stride(0),
            eps,
            SIZE=size,
            D=d,
            num_warps=min(16, max(1, d // 512)),
        )
    return output if indices is not None else output.view(hidden.shape)
