"""Rotary position embedding: turns the pairs (i, i + rotary_dim / 2) of every head by its token's angles.

Shapes: heads [num_tokens, num_heads, head_dim] of any floating dtype, last dimension contiguous;
cos_sin [num_tokens, rotary_dim] float32, cosines then sines; rotary_dim is even and at most head_dim, what lies beyond
it is left alone. Works in place.
Source: Su et al. 2021, RoFormer, section 3.4.2, with halves in place of neighbours as pairs.
"""

from __future__ import annotations

import torch


def rotary_embedding_reference(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Plain torch, float32 inside."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    first.copy_(turned_first)
    second.copy_(turned_second)


def rotary_embedding(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Turn `heads` [num_tokens, num_heads, head_dim] in place by `cos_sin` [num_tokens, rotary_dim]."""
    if heads.is_cuda:
        from kernels.gpu.rotary_embedding import rotary_embedding_triton

        rotary_embedding_triton(heads, cos_sin)
    else:
        rotary_embedding_reference(heads, cos_sin)
