"""Causal attention of several new tokens a sequence over its paged context, themselves included.

Shapes: query [num_tokens, num_heads, head_dim], the rows of sequence i being cu_seqlens_q[i] to cu_seqlens_q[i + 1];
k_cache, v_cache, kv_scales as in `store_kv_cache`; block_tables [num_seqs, max_blocks] int32; cu_seqlens_q
[num_seqs + 1] int32; seq_lens [num_seqs] int32, computed tokens and the new ones together, the new ones being the last;
a sequence of padding has neither. The result has query's shape and dtype. With a sliding window a token sees the last
`sliding_window` tokens, itself included.
Source: Dao 2023, FlashAttention-2, section 3, over Kwon et al. 2023, PagedAttention, section 4.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernels.gather_kv_cache import gather_kv_cache


def prefill_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch, float32 inside: one sequence after the other."""
    block_size = k_cache.shape[2]
    output = torch.empty_like(query)
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales
    starts = cu_seqlens_q.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        num_new = rows.stop - rows.start
        if num_new == 0:
            continue
        table = block_tables[index : index + 1, : -(-length // block_size)]
        keys = gather_kv_cache(k_cache, table, k_scales)[:, :, :length].float()
        values = gather_kv_cache(v_cache, table, v_scales)[:, :, :length].float()
        is_plain = num_new == length and (sliding_window is None or length <= sliding_window)
        attended = functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None].float(),
            keys,
            values,
            attn_mask=None if is_plain else _seen(num_new, length, sliding_window, query.device),
            is_causal=is_plain,
            scale=scale,
            enable_gqa=True,
        )
        output[rows] = attended[0].transpose(0, 1)
    return output


def _seen(num_new: int, length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Which of `length` positions each of the last `num_new` sees: [num_new, length] bool."""
    positions = torch.arange(length, device=device)
    behind = positions[length - num_new :, None] - positions
    seen = behind >= 0
    return seen if sliding_window is None else seen & (behind < sliding_window)


def prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from `query` [num_tokens, num_heads, head_dim], several rows a sequence; the caller owns the result."""
    arguments = (query, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens)
    if query.is_cuda and k_cache.dtype != torch.int8:
        from kernels.gpu.prefill_attention import prefill_attention_triton

        return prefill_attention_triton(*arguments, scale=scale, sliding_window=sliding_window, kv_scales=kv_scales)
    return prefill_attention_reference(*arguments, scale=scale, sliding_window=sliding_window, kv_scales=kv_scales)
