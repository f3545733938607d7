"""See `kernels.linear`: the product by one tile shape for any number of rows, so that what a row gets does not depend
on the rows beside it. A library of matrix products chooses by the number of rows how it cuts the inputs up, and so how
sums are rounded; it is faster, and used where nobody asks for the same bits in any batch.

A tile of 64 rows does 64 products for two bytes of a 16-bit weight, below what it takes to keep the tensor cores of
current GPUs busy, so few rows still cost about the time of reading the weight.
Source: He 2025, Defeating Nondeterminism in LLM Inference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import dot, rounded

M, N, K = 64, 64, 64
GROUP = 8
"""Tiles of rows that use the same weights one after the other, so that these are still in the chip's cache."""
OPTIONS = {"num_warps": 4, "num_stages": 4}
AMD_OPTIONS = {"num_stages": 2}


@triton.jit
def _linear_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_row_tiles, num_column_tiles = tl.cdiv(num_rows, M), tl.cdiv(num_outputs, N)
    program = tl.program_id(0)
    first = program // (GROUP * num_column_tiles) * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    within = program % (GROUP * num_column_tiles)
    rows = ((first + within % height) * M + tl.arange(0, M)).to(tl.int64)
    columns = (within // height * N + tl.arange(0, N)).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < num_outputs

    total = tl.zeros([M, N], tl.float32)
    for start in range(0, num_inputs, K):
        inputs = start + tl.arange(0, K)
        is_input = inputs < num_inputs
        left = tl.load(
            rows_ptr + rows[:, None] * row_stride + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        right = tl.load(
            weight_ptr + columns[None, :] * num_inputs + inputs[:, None],
            mask=is_column[None, :] & is_input[:, None],
            other=0.0,
        )
        total += dot(left, right)
    dtype = output_ptr.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    is_element = is_row[:, None] & is_column[None, :]
    result = rounded(total, dtype)
    if HAS_RESIDUAL:
        places = rows[:, None] * residual_stride + columns[None, :]
        residual = tl.load(residual_ptr + places, mask=is_element, other=0.0)
        result = rounded(residual.to(tl.float32) + result.to(tl.float32), dtype)
    tl.store(output_ptr + rows[:, None] * num_outputs + columns[None, :], result, mask=is_element)


def linear_triton(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply `weight`, contiguous, to `rows`, contiguous in the last dimension."""
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0]
    assert weight.shape == (num_outputs, num_inputs)
    assert weight.is_contiguous()
    assert rows.stride(1) == 1
    assert bias is None or (bias.shape == (num_outputs,) and bias.is_contiguous())
    assert residual is None or (residual.shape == (num_rows, num_outputs) and residual.stride(1) == 1)
    output = torch.empty((num_rows, num_outputs), dtype=rows.dtype, device=rows.device)
    if num_rows:
        _linear_kernel[triton.cdiv(num_rows, M) * triton.cdiv(num_outputs, N),](
            rows,
            weight,
            weight if bias is None else bias,
            rows if residual is None else residual,
            output,
            num_rows,
            num_outputs,
            num_inputs,
            rows.stride(0),
            0 if residual is None else residual.stride(0),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            M=M,
            N=N,
            K=K,
            GROUP=GROUP,
            **OPTIONS,
        )
    return output
