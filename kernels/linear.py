"""A matrix applied to rows, with an optional bias, the gate of a SwiGLU, and a sum with other rows on the way out.

Shapes: rows [num_rows, num_inputs]; weight [num_outputs, num_inputs]; bias [num_outputs]; residual and result
[num_rows, num_outputs], or half as many outputs where they are gated: `silu(first half) * second half`. The residual is
used up: the result may lie in its memory.
Source: Shazeer 2020, GLU Variants Improve Transformer, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as functional

from kernels.cpu.packed_matrix import PackedMatrix
from kernels.cpu.plan import AnyRows, PlannedRows
from kernels.cpu.structs import Kind
from kernels.quantized_matmul import quantized_matmul
from kernels.quantized_matrix import QuantizedMatrix
from kernels.silu_and_mul import silu_and_mul


@dataclass(frozen=True, slots=True)
class InvariantMatrix:
    """A weight [num_outputs, num_inputs] whose product with a row is the same to the bit beside any other rows."""

    tensor: torch.Tensor


AnyMatrix: TypeAlias = torch.Tensor | PackedMatrix | QuantizedMatrix | InvariantMatrix

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


def linear_onto(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """BLAS with `residual` as the accumulator, in place.

    Of the rows of the sum a decode step on a GPU then moves four times their bytes before the next product: the product
    reads and writes them, and so does the norm. It would be five with `add_rms_norm`, which reads product and residual
    and writes sum and norm, and six with an addition of its own.
    """
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(rows, weight.t())


def linear_invariant(
    rows: torch.Tensor,
    weight: InvariantMatrix,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """On a GPU, by one shape of tile for any number of rows."""
    from kernels.gpu.linear import linear_triton

    product = linear_triton(rows, weight.tensor, bias, None if is_gated else residual)
    if not is_gated:
        return product
    gated = silu_and_mul(product)
    return gated if residual is None else residual + gated


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
    """Apply `weight` [num_outputs, num_inputs] to `rows`; the caller owns the result, not the residual."""
    if isinstance(rows, PlannedRows):
        assert isinstance(weight, PackedMatrix)
        assert not isinstance(residual, torch.Tensor)
        return linear_cpu(rows, weight, bias, residual, is_gated=is_gated)
    assert not isinstance(weight, PackedMatrix)
    assert not isinstance(residual, PlannedRows)
    if isinstance(weight, InvariantMatrix):
        return linear_invariant(rows, weight, bias, residual, is_gated=is_gated)
    if rows.is_cuda and residual is not None and not is_gated and isinstance(weight, torch.Tensor):
        return linear_onto(rows, weight, bias, residual)
    return linear_reference(rows, weight, bias, residual, is_gated=is_gated)
