"""The gate of a SwiGLU feed-forward: `silu(gate) * up` of one fused projection.

Shapes: gate_up [..., 2 * size], gate first; the result is [..., size] in gate_up's dtype.
Source: Shazeer 2020, GLU Variants Improve Transformer, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch, float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(gate_up.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate the second half of `gate_up` [..., 2 * size] by its first; the caller owns the result [..., size]."""
    if gate_up.is_cuda:
        from kernels.gpu.gate_and_mul import gate_and_mul_triton

        return gate_and_mul_triton(gate_up, "silu")
    return silu_and_mul_reference(gate_up)
