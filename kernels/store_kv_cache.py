"""Write keys and values of new tokens into their slots of the paged cache.

Shapes: key, value [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache one layer's views
[num_blocks, num_kv_heads, block_size, head_dim] of one block-major cache: equal strides, one head's tile
[block_size, head_dim] contiguous, every other stride a multiple of head_dim; slots [num_tokens] int64,
`block_id * block_size + offset`, no slot twice, or -1 for a row of padding, of which nothing is stored. The caches are
mutated; a cache of another dtype rounds, an int8 one holds heads as `eight_bit_heads` says, head_dim + 4 wide, a float8
one as `fp8_heads` does, with kv_scales [2, num_kv_heads] float32, the keys' and the values'.
Source: Kwon et al. 2023, Efficient Memory Management for Large Language Model Serving with PagedAttention, section 4.
"""

from __future__ import annotations

import torch

from kernels.eight_bit_heads import quantize_heads
from kernels.fp8_heads import quantize_fp8


def store_kv_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Plain torch: one row copy for each token and head."""
    if (slots < 0).any():
        is_stored = slots >= 0
        key, value, slots = key[is_stored], value[is_stored], slots[is_stored]
    num_blocks, num_kv_heads, block_size, width = k_cache.shape
    block_step, head_step = k_cache.stride(0) // width, k_cache.stride(1) // width
    num_rows = (num_blocks - 1) * block_step + (num_kv_heads - 1) * head_step + block_size
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    first_rows = blocks * (block_step - block_size) + slots
    rows = (first_rows[:, None] + torch.arange(num_kv_heads, device=slots.device) * head_step).flatten()
    for index, (new, cache) in enumerate(((key, k_cache), (value, v_cache))):
        flat = cache.as_strided((num_rows, width), (width, 1), cache.storage_offset())
        if cache.dtype == torch.int8:
            stored = quantize_heads(new)
        elif kv_scales is not None:  # as integers: torch copies no rows of float8 on a CPU
            flat, stored = flat.view(torch.uint8), quantize_fp8(new, kv_scales[index]).view(torch.uint8)
        else:
            stored = new.to(cache.dtype)
        flat.index_copy_(0, rows, stored.reshape(-1, width))


def store_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store `key` and `value` [num_tokens, num_kv_heads, head_dim] at `slots` [num_tokens] of one layer's cache."""
    store_kv_cache_reference(key, value, k_cache, v_cache, slots, kv_scales)
