"""Rows rounded to floats of eight bits (e4m3), each group of a row by a scale of its own that makes its largest element
the format's largest.

Shapes: rows [num_rows, size]; codes the same, e4m3; scales float32 [num_rows, num_groups].
Source: Micikevicius et al. 2022, FP8 formats for deep learning; DeepSeek-AI 2024, DeepSeek-V3, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max


@dataclass(frozen=True, slots=True, kw_only=True)
class E4m3Rows:
    """Rows rounded to eight bits.

    Attributes:
        codes: e4m3 [num_rows, num_inputs].
        scales: float32 [num_rows, num_groups]; a group stands for its codes times its scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantize_rows_reference(rows: torch.Tensor, group_size: int) -> E4m3Rows:
    """Round each `group_size` elements of a row so that their largest is e4m3's."""
    num_rows, size = rows.shape
    groups = functional.pad(rows.float(), (0, -size % group_size)).view(num_rows, -1, group_size)
    scales = groups.abs().amax(2) / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (groups / scales[:, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return E4m3Rows(codes=codes.view(num_rows, -1)[:, :size].contiguous(), scales=scales)


def quantize_rows(rows: torch.Tensor, group_size: int) -> E4m3Rows:
    """Round `rows` in groups of `group_size` elements; the caller owns the result."""
    if rows.is_cuda:
        from kernels.gpu.quantize_rows import quantize_rows_triton

        return quantize_rows_triton(rows, group_size)
    return quantize_rows_reference(rows, group_size)
