"""See `kernels.silu_and_mul` and `kernels.gelu_and_mul`: a program takes a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import rounded

PIECE = 1024


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # (1 + tanh(x)) / 2 is the sigmoid of 2 x; by its smaller half, so that nothing overflows.
    double = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
    smaller = tl.exp(-tl.abs(double))
    return gate * tl.where(double < 0, smaller, 1.0) / (1 + smaller)


@triton.jit
def _gate_and_mul_kernel(gate_up_ptr, output_ptr, row_stride, size, ACTIVATION: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_column = columns < size
    places = gate_up_ptr + row * row_stride + columns
    gate = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(places + size, mask=is_column, other=0.0).to(tl.float32)
    gated = rounded(_activated(gate, ACTIVATION) * up, output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * size + columns, gated, mask=is_column)


def gate_and_mul_triton(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`gate_up` [..., 2 * size], rows of one stride, last dimension contiguous.

    Args:
        activation: silu, gelu, or gelu_tanh, which is gelu by its approximation.
    """
    size = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.ndim == 2 else gate_up.reshape(-1, 2 * size)
    assert rows.stride(1) == 1
    assert activation in ("silu", "gelu", "gelu_tanh")
    output = torch.empty((len(rows), size), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        _gate_and_mul_kernel[len(rows), triton.cdiv(size, PIECE)](
            rows, output, rows.stride(0), size, ACTIVATION=activation, PIECE=PIECE
        )
    return output.view(*gate_up.shape[:-1], size)
