"""One head of one token of the KV cache in eight bits: `head_dim` integers, then the float32 they are multiplied with.

Shapes: heads [..., head_dim] of any float dtype; stored [..., head_dim + 4] int8, contiguous in the last dimension, the
scale in its last four bytes. A scale is the head's largest magnitude over 127, so what is stored is within half a scale
of what was given.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4


def head_dim_of(cache: torch.Tensor) -> int:
    """Elements of a head in a cache [..., width], whatever it stores them as."""
    return cache.shape[-1] - SCALE_BYTES if cache.dtype == torch.int8 else cache.shape[-1]


def quantize_heads(heads: torch.Tensor) -> torch.Tensor:
    """`heads` as a cache of int8 stores them."""
    values = heads.float()
    most = values.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 0, 127.0 / most, 0.0)
    integers = (values * inverse).round().to(torch.int8)
    return torch.cat((integers, (most / 127.0).contiguous().view(torch.int8)), dim=-1)


def dequantize_heads(stored: torch.Tensor) -> torch.Tensor:
    """What `stored` stands for, float32."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float() * scales
