"""Root-mean-square layer norm over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.

Shapes: hidden [..., size], weight [size], any floating dtype; the result has hidden's shape and dtype.
Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, equation 4.
"""

from __future__ import annotations

import torch


def rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch, float32 inside; rounds to hidden's dtype before the weight, as the models were trained."""
    exact = hidden.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(eps))
    return (exact * scale).to(hidden.dtype).mul_(weight)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `hidden` [..., size] by `weight` [size]; the caller owns the result."""
    return rms_norm_reference(hidden, weight, eps)
