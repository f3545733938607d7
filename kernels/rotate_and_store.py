"""What happens to a fused projection before attention: norm of queries and keys, rotation, K and V to the cache.

Shapes: rows [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values; changed in place: queries
and keys come out normalised (where there are norms) and rotated. cos_sin [num_positions, rotary_dim] float32;
positions, slots [num_tokens] int64; k_cache, v_cache, kv_scales as in `store_kv_cache`. A row of padding has slot -1
and any position there is: it is changed like the others, and nothing of it is stored.
Source: see `rms_norm`, `rotary_embedding` and `store_kv_cache`.
"""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows, AnyTensor, PlannedRows
from kernels.cpu.structs import Kind
from kernels.eight_bit_heads import head_dim_of
from kernels.rms_norm import rms_norm_reference
from kernels.rotary_embedding import rotary_embedding_reference
from kernels.store_kv_cache import store_kv_cache_reference


def rotate_and_store_reference(
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch."""
    num_kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
    heads = rows.view(len(rows), -1, head_dim)
    first_value = heads.shape[1] - num_kv_heads
    query, key, value = heads.tensor_split((first_value - num_kv_heads, first_value), dim=1)
    if norms is not None:
        query.copy_(rms_norm_reference(query, norms[0], eps))
        key.copy_(rms_norm_reference(key, norms[1], eps))
    rotary_embedding_reference(heads[:, :first_value], cos_sin[positions])
    store_kv_cache_reference(key, value, k_cache, v_cache, slots, kv_scales)
    return rows


def rotate_and_store_cpu(
    rows: PlannedRows,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> PlannedRows:
    """Planned: `kernels/cpu/rotate_and_store.h`; positions and slots are a step's, which has no padding."""
    num_kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
    query_norm, key_norm = (None, None) if norms is None else (each.float().contiguous() for each in norms)
    return rows.plan.add(
        Kind.ROTATE_AND_STORE,
        rows,
        input=rows,
        tensors={
            "weight": query_norm,
            "second_weight": key_norm,
            "cos_sin": cos_sin,
            "keys": k_cache,
            "values": v_cache,
        },
        num_heads=rows.columns // head_dim - 2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=cos_sin.shape[1],
        eps=eps,
    )


def rotate_and_store(
    rows: AnyRows,
    positions: AnyTensor,
    slots: AnyTensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> AnyRows:
    """Change `rows` in place and store their keys and values; returns `rows`."""
    if isinstance(rows, PlannedRows):
        return rotate_and_store_cpu(rows, cos_sin, k_cache, v_cache, norms, eps)
    assert isinstance(positions, torch.Tensor)
    assert isinstance(slots, torch.Tensor)
    if rows.is_cuda and k_cache.dtype != torch.int8:
        from kernels.gpu.rotate_and_store import rotate_and_store_triton

        return rotate_and_store_triton(rows, positions, slots, cos_sin, k_cache, v_cache, norms, eps, kv_scales)
    return rotate_and_store_reference(rows, positions, slots, cos_sin, k_cache, v_cache, norms, eps, kv_scales)
