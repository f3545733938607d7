"""A matrix of four or eight bits a weight applied to rows, with an optional bias.

Shapes: rows [num_rows, num_inputs]; weight a `QuantizedMatrix` [num_outputs, num_inputs]; bias [num_outputs]; the
result [num_rows, num_outputs] has the rows' dtype. Weights are what their codes stand for, without rounding to the
rows' dtype; where `quantizes_rows`, the rows of a large batch are rounded to e4m3 first, on GPUs that multiply it.
Source: Frantar et al. 2022, GPTQ; Lin et al. 2023, AWQ; DeepSeek-AI 2024, DeepSeek-V3, section 3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernels.quantize_rows import quantize_rows_reference
from kernels.quantized_matrix import QuantizedMatrix


def quantized_matmul_reference(
    rows: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None, *, quantizes_rows: bool = False
) -> torch.Tensor:
    """Plain torch, float32 inside."""
    exact = rows.float()
    if quantizes_rows:
        rounded = quantize_rows_reference(rows, weight.group_size)
        scales = rounded.scales.repeat_interleave(weight.group_size, 1)[:, : weight.num_inputs]
        exact = rounded.codes.float() * scales
    product = functional.linear(exact, weight.unpacked().dequantized(), None if bias is None else bias.float())
    return product.to(rows.dtype)


def quantized_matmul(rows: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `weight` to `rows`; the caller owns the result."""
    if rows.is_cuda:
        from kernels.gpu.quantized_matmul import quantized_matmul_triton

        return quantized_matmul_triton(rows, weight, bias)
    return quantized_matmul_reference(rows, weight, bias)
