"""See `kernels.rotary_embedding`: a program takes one head of one token and turns each pair where it lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import rounded


@triton.jit
def _rotary_embedding_kernel(heads_ptr, cos_sin_ptr, token_stride, head_stride, HALF: tl.constexpr, P: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, P)
    is_pair = pairs < HALF
    first_ptr = heads_ptr + token * token_stride + head * head_stride + pairs
    cos_ptr = cos_sin_ptr + token * 2 * HALF + pairs
    cos = tl.load(cos_ptr, mask=is_pair, other=1.0)
    sin = tl.load(cos_ptr + HALF, mask=is_pair, other=0.0)
    first = tl.load(first_ptr, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=is_pair, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    tl.store(first_ptr, rounded(first * cos - second * sin, dtype), mask=is_pair)
    tl.store(first_ptr + HALF, rounded(second * cos + first * sin, dtype), mask=is_pair)


def rotary_embedding_triton(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """`heads` [num_tokens, num_heads, head_dim] of any strides but the last, `cos_sin` contiguous."""
    num_tokens, num_heads, head_dim = heads.shape
    half = cos_sin.shape[1] // 2
    assert heads.stride(2) == 1
    assert len(cos_sin) == num_tokens
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    assert 2 * half <= head_dim
    if num_tokens and num_heads:
        _rotary_embedding_kernel[num_tokens, num_heads](
            heads, cos_sin, heads.stride(0), heads.stride(1), HALF=half, P=triton.next_power_of_2(half), num_warps=1
        )
