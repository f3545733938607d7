"""See `kernels.silu_and_mul`: a program takes a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import rounded

PIECE = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, output_ptr, row_stride, size, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_column = columns < size
    places = gate_up_ptr + row * row_stride + columns
    gate = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(places + size, mask=is_column, other=0.0).to(tl.float32)
    gated = gate / (1 + tl.exp(-gate)) * up
    tl.store(output_ptr + row * size + columns, rounded(gated, output_ptr.dtype.element_ty), mask=is_column)


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [..., 2 * size], rows of one stride, last dimension contiguous."""
    size = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.ndim == 2 else gate_up.reshape(-1, 2 * size)
    assert rows.stride(1) == 1
    output = torch.empty((len(rows), size), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        _silu_and_mul_kernel[len(rows), triton.cdiv(size, PIECE)](rows, output, rows.stride(0), size, PIECE=PIECE)
    return output.view(*gate_up.shape[:-1], size)
