"""Attention of one new token a sequence over its paged context, the token itself included.

Shapes: query [num_seqs, num_heads, head_dim]; k_cache, v_cache, kv_scales as in `store_kv_cache`; block_tables
[num_seqs, max_blocks] int32, entries beyond a sequence's blocks being any valid block; seq_lens [num_seqs] int32, the
new token counted, or 0 for a row of padding, whose result is zeros. num_heads is a multiple of num_kv_heads. The result
has query's shape and dtype. With a sliding window a token sees the last `sliding_window` tokens, itself included.
Source: Kwon et al. 2023, PagedAttention, section 4.3; Ainslie et al. 2023, GQA; Beltagy et al. 2020, Longformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.gather_kv_cache import gather_kv_cache

_MAX_PADDING = 1.25
_MAX_RUN = 8


def decode_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch, float32 inside: a few neighbours of similar length at a time, so that padding stays within a quarter
    and what was gathered is still in the processor's cache when it is read."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    grouped = query.float().mul(scale).view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales
    num_blocks = [-(-length // block_size) for length in seq_lens.tolist()]
    outputs = []
    for start, end in _similar_runs(num_blocks):
        tables = block_tables[start:end, : max(num_blocks[start:end])]
        keys = gather_kv_cache(k_cache, tables, k_scales).float()
        values = gather_kv_cache(v_cache, tables, v_scales).float()
        ends = seq_lens[start:end, None]
        positions = torch.arange(keys.shape[2], device=query.device)
        unseen = positions >= ends
        values.transpose(1, 2)[unseen] = 0.0
        if sliding_window is not None:
            unseen |= positions < ends - sliding_window
        scores = grouped[start:end] @ keys.transpose(-1, -2)
        scores.masked_fill_(unseen[:, None, None, :], float("-inf"))
        outputs.append(torch.softmax(scores, dim=-1) @ values)
    return torch.cat(outputs).view(query.shape).to(query.dtype)


def _similar_runs(num_blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut the sequences, in order, into short runs whose longest is at most a quarter longer than their shortest."""
    start, shortest, longest = 0, num_blocks[0], num_blocks[0]
    for index, count in enumerate(num_blocks):
        shortest, longest = min(shortest, count), max(longest, count)
        if longest > shortest * _MAX_PADDING or index - start == _MAX_RUN:
            yield start, index
            start, shortest, longest = index, count, count
    yield start, len(num_blocks)


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend from `query` [num_seqs, num_heads, head_dim], one row a sequence; the caller owns the result.

    Args:
        is_batch_invariant: a sequence's result is the same to the bit in any batch.
    """
    arguments = (query, k_cache, v_cache, block_tables, seq_lens)
    if query.is_cuda and k_cache.dtype != torch.int8:
        from kernels.gpu.decode_attention import INVARIANT_SPLIT_SIZE, decode_attention_triton

        return decode_attention_triton(
            *arguments,
            scale=scale,
            sliding_window=sliding_window,
            kv_scales=kv_scales,
            split_size=INVARIANT_SPLIT_SIZE if is_batch_invariant else None,
        )
    return decode_attention_reference(*arguments, scale=scale, sliding_window=sliding_window, kv_scales=kv_scales)
