"""Root-mean-square layer norm over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.

Shapes: hidden [..., size], weight [size], any floating dtype; the result has hidden's shape and dtype.
Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, equation 4.
"""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows, AnyTensor, PlannedRows
from kernels.cpu.structs import Kind


def rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch, float32 inside; rounds to hidden's dtype before the weight, as the models were trained."""
    exact = hidden.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(eps))
    return (exact * scale).to(hidden.dtype).mul_(weight)


def rms_norm_cpu(hidden: PlannedRows, weight: torch.Tensor, eps: float, *, of_logits: bool = False) -> PlannedRows:
    """Planned: `kernels/cpu/rms_norm.h`; of all rows, or of those whose logits a step wants."""
    plan = hidden.plan
    output = plan.rows(hidden.columns, is_for_logits=of_logits)
    return plan.add(Kind.RMS_NORM, output, input=hidden, tensors={"weight": weight.float().contiguous()}, eps=eps)


def rms_norm(hidden: AnyRows, weight: torch.Tensor, eps: float, indices: AnyTensor | None = None) -> AnyRows:
    """Normalise `hidden` [..., size] by `weight` [size], or only its rows `indices`; the caller owns the result."""
    if isinstance(hidden, PlannedRows):
        return rms_norm_cpu(hidden, weight, eps, of_logits=indices is not None)
    assert indices is None or isinstance(indices, torch.Tensor)
    if hidden.is_cuda:
        from kernels.gpu.rms_norm import rms_norm_triton

        return rms_norm_triton(hidden, weight, eps, indices)
    return rms_norm_reference(hidden if indices is None else hidden[indices], weight, eps)
