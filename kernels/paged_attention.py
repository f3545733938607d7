"""Causal attention of a ragged batch over its paged context: decoding sequences, which come first, and all others.

Shapes: rows [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read; k_cache, v_cache,
kv_scales as in `store_kv_cache`; the batch's tensors as in `decode_attention` and `prefill_attention`. The result is
[num_tokens, num_heads * head_dim].
Source: see `decode_attention` and `prefill_attention`.
"""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows, PlannedBatch, PlannedRows, StepBatch
from kernels.cpu.structs import Kind
from kernels.decode_attention import decode_attention
from kernels.eight_bit_heads import head_dim_of
from kernels.prefill_attention import prefill_attention


def paged_attention_parts(
    rows: torch.Tensor,
    batch: StepBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
) -> torch.Tensor:
    """Each kind of sequence through its own op."""
    num_kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
    query = rows.view(len(rows), -1, head_dim)[:, : -2 * num_kv_heads]
    scale, num_decodes = head_dim**-0.5, batch.num_decodes
    parts = []
    if num_decodes:
        parts.append(
            decode_attention(
                query[:num_decodes],
                k_cache,
                v_cache,
                batch.block_tables[:num_decodes],
                batch.seq_lens[:num_decodes],
                scale=scale,
                sliding_window=sliding_window,
                kv_scales=kv_scales,
                is_batch_invariant=is_batch_invariant,
            )
        )
    if num_decodes < len(batch.seq_lens):
        parts.append(
            prefill_attention(
                query[num_decodes:],
                k_cache,
                v_cache,
                batch.block_tables[num_decodes:],
                batch.cu_seqlens_q[num_decodes:] - num_decodes,
                batch.seq_lens[num_decodes:],
                scale=scale,
                sliding_window=sliding_window,
                kv_scales=kv_scales,
            )
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def paged_attention_cpu(
    rows: PlannedRows, k_cache: torch.Tensor, v_cache: torch.Tensor, *, sliding_window: int | None = None
) -> PlannedRows:
    """Planned: `kernels/cpu/attention.h`; the batch is a step's."""
    num_kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
    num_heads = rows.columns // head_dim - 2 * num_kv_heads
    return rows.plan.add(
        Kind.ATTENTION,
        rows.plan.rows(num_heads * head_dim),
        input=rows,
        tensors={"keys": k_cache, "values": v_cache},
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=sliding_window or 0,
        scale=head_dim**-0.5,
    )


def paged_attention(
    rows: AnyRows,
    batch: StepBatch | PlannedBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
) -> AnyRows:
    """Attend from the queries in `rows`; the caller owns the result."""
    if isinstance(rows, PlannedRows):
        return paged_attention_cpu(rows, k_cache, v_cache, sliding_window=sliding_window)
    assert not isinstance(batch, PlannedBatch)
    return paged_attention_parts(
        rows,
        batch,
        k_cache,
        v_cache,
        sliding_window=sliding_window,
        kv_scales=kv_scales,
        is_batch_invariant=is_batch_invariant,
    )
