"""See `kernels.moe`. Five launches: tokens choose experts, pairs of token and expert are sorted by expert, an expert's
pairs meet its gate and up, then its down, and a token's results are added.

Rows of gate and up are taken by turns, so that the two products that make one value lie side by side in one thread.
How a pair's sums are added depends on `tile_rows` alone: where that is fixed, a token's result does not depend on the
batch it is in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.grouped_rows import TileShape, choose_shape, gathered_product, group_rows, tile_and_block
from kernels.gpu.precision import rounded

PIECE = 1024
SHAPES = (
    TileShape(rows=16, outputs=64, row_bytes=256, num_warps=4, num_stages=4),
    TileShape(rows=64, outputs=128, row_bytes=128, num_warps=4, num_stages=3),
    TileShape(rows=128, outputs=128, row_bytes=128, num_warps=8, num_stages=3),
)
INVARIANT_ROWS = 64
"""Of the tiles where nothing may depend on the batch."""


@triton.jit
def _route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    E: tl.constexpr,
):
    """A token's experts, the highest first, and their weights."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, E)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * row_stride + experts, mask=is_expert, other=0.0).to(tl.float32)
    # Without NaN the best is always an expert that is there.
    left = tl.where(is_expert & (logits == logits), logits, float("-inf"))
    shares = tl.exp(tl.where(is_expert, logits - tl.max(left, 0), float("-inf")))
    ranks = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros_like(ranks)
    weights = tl.zeros(ranks.shape, tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        chosen = tl.where(ranks == rank, best, chosen)
        weights = tl.where(ranks == rank, tl.sum(tl.where(experts == best, shares, 0.0), 0), weights)
        left = tl.where(experts == best, float("-inf"), left)
    weights /= tl.sum(weights, 0) if IS_RENORMALISED else tl.sum(shares, 0)
    places = token * TOP_K + ranks
    tl.store(experts_ptr + places, chosen, mask=ranks < TOP_K)
    tl.store(weights_ptr + places, weights, mask=ranks < TOP_K)


@triton.jit
def _gate_up_kernel(
    hidden_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    gated_ptr,
    num_tiles,
    row_stride,
    HIDDEN_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """`silu(gate) * up` of a tile of pairs, half of N values of each."""
    half: tl.constexpr = N // 2
    tile, block = tile_and_block(tl.program_id(0), num_tiles, tl.cdiv(SIZE, half), BAND)
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + tile.to(tl.int64) * M + tl.arange(0, M))
    is_pair = pairs >= 0
    tokens = tl.where(is_pair, pairs // TOP_K, 0).to(tl.int64)
    by_turns = tl.arange(0, N)
    outputs = block * half + by_turns // 2
    matrix_ptr = weight_ptr + expert.to(tl.int64) * (2 * SIZE * HIDDEN_SIZE)
    products = gathered_product(
        hidden_ptr + tokens * row_stride,
        is_pair,
        matrix_ptr + (by_turns % 2 * SIZE + outputs).to(tl.int64) * HIDDEN_SIZE,
        outputs < SIZE,
        0,
        HIDDEN_SIZE,
        M,
        N,
        K,
    )
    gate, up = tl.split(tl.reshape(products, (M, half, 2)))
    gated = gate / (1 + tl.exp(-gate)) * up
    columns = block * half + tl.arange(0, half)
    places = pairs.to(tl.int64)[:, None] * SIZE + columns[None, :]
    is_value = is_pair[:, None] & (columns < SIZE)[None, :]
    tl.store(gated_ptr + places, rounded(gated, gated_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _down_kernel(
    gated_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    product_ptr,
    num_tiles,
    HIDDEN_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BAND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """The expert's result of a tile of pairs, N values of each."""
    tile, block = tile_and_block(tl.program_id(0), num_tiles, tl.cdiv(HIDDEN_SIZE, N), BAND)
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + tile.to(tl.int64) * M + tl.arange(0, M))
    is_pair = pairs >= 0
    pairs = tl.where(is_pair, pairs, 0).to(tl.int64)
    columns = block * N + tl.arange(0, N)
    matrix_ptr = weight_ptr + expert.to(tl.int64) * (HIDDEN_SIZE * SIZE)
    products = gathered_product(
        gated_ptr + pairs * SIZE,
        is_pair,
        matrix_ptr + columns.to(tl.int64) * SIZE,
        columns < HIDDEN_SIZE,
        0,
        SIZE,
        M,
        N,
        K,
    )
    is_value = is_pair[:, None] & (columns < HIDDEN_SIZE)[None, :]
    places = pairs[:, None] * HIDDEN_SIZE + columns[None, :]
    tl.store(product_ptr + places, rounded(products, product_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _combine_kernel(
    product_ptr,
    weights_ptr,
    residual_ptr,
    output_ptr,
    residual_stride,
    HIDDEN_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A piece of a token: its experts' results by their weights, the highest first."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_column = columns < HIDDEN_SIZE
    total = tl.zeros([PIECE], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        product = tl.load(product_ptr + pair * HIDDEN_SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total += product * tl.load(weights_ptr + pair)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output_ptr + token * HIDDEN_SIZE + columns, rounded(total, output_ptr.dtype.element_ty), mask=is_column)


def moe_triton(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    top_k: int,
    is_renormalised: bool,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Rows contiguous in the last dimension, matrices contiguous.

    Args:
        tile_rows: of one of `SHAPES`; None takes what suits the pairs that an expert has on average.
    """
    num_tokens, hidden_size = hidden.shape
    num_experts, _, size = down.shape
    assert router_logits.shape == (num_tokens, num_experts)
    assert gate_up.shape == (num_experts, 2 * size, hidden_size)
    assert down.shape == (num_experts, hidden_size, size)
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert hidden.stride(1) == router_logits.stride(1) == 1
    assert 1 <= top_k <= num_experts
    assert residual is None or (residual.shape == hidden.shape and residual.stride(1) == 1)
    output = torch.empty((num_tokens, hidden_size), dtype=hidden.dtype, device=hidden.device)
    if num_tokens == 0:
        return output
    num_pairs = num_tokens * top_k
    shapes = [shape for shape in SHAPES if tile_rows in (None, shape.rows)]
    shape = choose_shape(shapes, num_pairs, num_experts)
    experts, weights = _route(router_logits, top_k, is_renormalised)
    pairs = group_rows(experts.view(-1), num_experts, shape.rows)
    gated = torch.empty((num_pairs, size), dtype=hidden.dtype, device=hidden.device)
    products = torch.empty((num_pairs, hidden_size), dtype=hidden.dtype, device=hidden.device)
    common = {
        "HIDDEN_SIZE": hidden_size,
        "SIZE": size,
        **shape.constants(hidden.element_size()),
        **shape.options,
    }
    _gate_up_kernel[pairs.num_tiles * triton.cdiv(size, shape.outputs // 2),](
        hidden,
        gate_up,
        pairs.rows,
        pairs.tile_groups,
        gated,
        pairs.num_tiles,
        hidden.stride(0),
        TOP_K=top_k,
        **common,
    )
    _down_kernel[pairs.num_tiles * triton.cdiv(hidden_size, shape.outputs),](
        gated, down, pairs.rows, pairs.tile_groups, products, pairs.num_tiles, **common
    )
    _combine_kernel[num_tokens, triton.cdiv(hidden_size, PIECE)](
        products,
        weights,
        hidden if residual is None else residual,
        output,
        0 if residual is None else residual.stride(0),
        HIDDEN_SIZE=hidden_size,
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        PIECE=PIECE,
    )
    return output


def _route(router_logits: torch.Tensor, top_k: int, is_renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens, top_k] each: experts int32 and weights float32."""
    num_tokens, num_experts = router_logits.shape
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    _route_kernel[num_tokens,](
        router_logits,
        experts,
        weights,
        router_logits.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        IS_RENORMALISED=is_renormalised,
        E=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    return experts, weights
