"""RMS norm of a sum of two rows, which is kept: `residual += rows`, then `rms_norm(residual)`.

Shapes: rows [num_rows, size]; residual the same, contiguous, changed in place; weight [size]; the result has rows'
shape and dtype. It serves where rows come of an op that can't add them to the residual itself; `linear` can, and then a
plain `rms_norm` has less to read.
Source: see `rms_norm`.
"""

from __future__ import annotations

import torch

from kernels.rms_norm import rms_norm_reference


def add_rms_norm_reference(
    rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Plain torch; the sum is rounded to residual's dtype before it is normalised."""
    return rms_norm_reference(residual.add_(rows), weight, eps)


def add_rms_norm(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `rows` [num_rows, size] to `residual` and normalise the sum by `weight`; the caller owns the result."""
    if rows.is_cuda:
        from kernels.gpu.rms_norm import rms_norm_triton

        return rms_norm_triton(rows, weight, eps, residual=residual)
    return add_rms_norm_reference(rows, residual, weight, eps)
