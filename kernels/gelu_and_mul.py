"""The gate of a GEGLU feed-forward: `gelu(gate) * up` of one fused projection.

Shapes: gate_up [..., 2 * size], gate first; the result is [..., size] in gate_up's dtype. gelu is `x * Phi(x)`, by the
error function, or with `is_tanh` by Hendrycks' approximation with tanh, which Gemma has.
Source: Shazeer 2020, GLU Variants Improve Transformer, section 2; Hendrycks and Gimpel 2016, Gaussian Error Linear
Units, section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional


def gelu_and_mul_reference(gate_up: torch.Tensor, *, is_tanh: bool = False) -> torch.Tensor:
    """Plain torch, float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh" if is_tanh else "none").mul_(up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor, *, is_tanh: bool = False) -> torch.Tensor:
    """Gate the second half of `gate_up` [..., 2 * size] by its first; the caller owns the result [..., size]."""
    if gate_up.is_cuda:
        from kernels.gpu.gate_and_mul import gate_and_mul_triton

        return gate_and_mul_triton(gate_up, "gelu_tanh" if is_tanh else "gelu")
    return gelu_and_mul_reference(gate_up, is_tanh=is_tanh)
