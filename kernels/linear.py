"""A matrix applied to rows, with an optional bias, the gate of a SwiGLU, and a sum with other rows on the way out.

Shapes: rows [num_rows, num_inputs]; weight [num_outputs, num_inputs]; bias [num_outputs]; residual and result
[num_rows, num_outputs], or half as many outputs where they are gated: `silu(first half) * second half`.
Source: Shazeer 2020, GLU Variants Improve Transformer, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernels.cpu.packed_matrix import PackedMatrix
from kernels.cpu.plan import AnyRows, PlannedRows
from kernels.cpu.structs import Kind
from kernels.quantized_matmul import quantized_matmul
from kernels.quantized_matrix import QuantizedMatrix
from kernels.silu_and_mul import silu_and_mul

AnyMatrix = torch.Tensor | PackedMatrix | QuantizedMatrix

_MAX_FLIPPED_ROWS = 128
"""Up to so many rows the CPU's float32 product is faster with the weight on the left: 2.2 x for 8 to 32 rows of a head
of 49,152, 1.5 x for a gate and up projection of 3,072, never slower."""


def linear_reference(
    rows: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Plain torch, but for a product with quantised weights on a GPU."""
    if isinstance(weight, QuantizedMatrix):
        product = quantized_matmul(rows, weight, bias)
    elif rows.device.type == "cpu" and rows.dtype == torch.float32 and 2 <= len(rows) <= _MAX_FLIPPED_ROWS:
        product = torch.mm(weight, rows.t()).t().contiguous()
        product = product if bias is None else product.add_(bias)
    else:
        product = functional.linear(rows, weight, bias)
    if is_gated:
        product = silu_and_mul(product)
    return product if residual is None else residual + product


def linear_cpu(
    rows: PlannedRows,
    weight: PackedMatrix,
    bias: torch.Tensor | None = None,
    residual: PlannedRows | None = None,
    *,
    is_gated: bool = False,
) -> PlannedRows:
    """Planned: `kernels/cpu/linear.h`."""
    plan = rows.plan
    columns = weight.num_outputs // 2 if is_gated else weight.num_outputs
    return plan.add(
        Kind.LINEAR,
        plan.rows(columns, is_for_logits=rows.is_for_logits),
        input=plan.quantized(rows, weight.row_format),
        residual=residual,
        matrix=weight,
        tensors={"second_weight": None if bias is None else weight.packed_bias(bias)},
        is_gated=is_gated,
    )


def linear(
    rows: AnyRows,
    weight: AnyMatrix,
    bias: torch.Tensor | None = None,
    residual: AnyRows | None = None,
    *,
    is_gated: bool = False,
) -> AnyRows:
    """Apply `weight` [num_outputs, num_inputs] to `rows`; the caller owns the result."""
    if isinstance(rows, PlannedRows):
        assert isinstance(weight, PackedMatrix)
        assert not isinstance(residual, torch.Tensor)
        return linear_cpu(rows, weight, bias, residual, is_gated=is_gated)
    assert not isinstance(weight, PackedMatrix)
    assert not isinstance(residual, PlannedRows)
    return linear_reference(rows, weight, bias, residual, is_gated=is_gated)
