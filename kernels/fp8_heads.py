"""Heads of the KV cache in float8_e4m3fn: each element over a scale that a KV head of a layer has for all its tokens.

Shapes: heads [..., num_kv_heads, head_dim] of any float dtype, stored in the same shape; scales [num_kv_heads] float32,
positive. What is beyond the 448 that the format holds is stored as that, NaN as NaN.
Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, sections 3 and 4.
"""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
MAXIMUM = 448.0


def quantize_fp8(heads: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`heads` as a cache of float8 stores them; they stand for what is stored times the scale."""
    return (heads.float() / scales[:, None]).clamp(-MAXIMUM, MAXIMUM).to(DTYPE)
