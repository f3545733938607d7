"""Both attention ops against attention the plain way, over caches whose every other slot is NaN."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_attention import decode_attention
from kernels.gather_kv_cache import gather_kv_cache
from kernels.prefill_attention import prefill_attention
from tests.kernels.paged_pool import TOLERANCE, fill, plain_attention, rms_ratio

LENGTHS = [1, 7, 63, 65, 64, 2, 130, 16, 17, 31, 33]
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 4, 40), (1, 5, 64)])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_decode_equals_plain_attention(
    dtype: torch.dtype, num_kv_heads: int, group: int, head_dim: int, block_size: int
) -> None:
    context = fill(LENGTHS, num_kv_heads, block_size, head_dim, dtype)
    query = torch.randn(len(LENGTHS), num_kv_heads * group, head_dim).to(dtype)
    scale = head_dim**-0.5

    output = decode_attention(
        query, context.pool.keys, context.pool.values, context.block_tables, context.seq_lens, scale=scale
    )

    assert output.dtype == dtype
    for row, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        expected = plain_attention(query[row : row + 1], key, value, scale)
        assert rms_ratio(output[row : row + 1], expected) < TOLERANCE[dtype]
    assert context.pool.poison_is_untouched()


@pytest.mark.parametrize("window", [1, 5, 64])
def test_decode_window_sees_only_the_last_tokens(window: int) -> None:
    context = fill(LENGTHS, 2, 16, 32)
    query = torch.randn(len(LENGTHS), 4, 32)

    output = decode_attention(
        query,
        context.pool.keys,
        context.pool.values,
        context.block_tables,
        context.seq_lens,
        scale=0.2,
        sliding_window=window,
    )

    for row, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        expected = plain_attention(query[row : row + 1], key, value, 0.2, window)
        assert rms_ratio(output[row : row + 1], expected) < 1e-5


def test_decode_does_not_depend_on_the_neighbours() -> None:
    context = fill([40, 300, 41, 5], 2, 16, 32)
    query = torch.randn(4, 4, 32)
    pool = context.pool
    together = decode_attention(query, pool.keys, pool.values, context.block_tables, context.seq_lens, scale=0.2)
    for row in range(4):
        only = slice(row, row + 1)
        alone = decode_attention(
            query[only], pool.keys, pool.values, context.block_tables[only], context.seq_lens[only], scale=0.2
        )
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 4, 40), (1, 5, 64)])
def test_prefill_equals_plain_attention(
    dtype: torch.dtype, window: int | None, num_kv_heads: int, group: int, head_dim: int
) -> None:
    lengths, new = [1, 7, 63, 65, 40], [1, 7, 2, 65, 0]
    context = fill(lengths, num_kv_heads, 16, head_dim, dtype)
    query = torch.randn(sum(new), num_kv_heads * group, head_dim).to(dtype)
    first_rows = [sum(new[:index]) for index in range(len(new) + 1)]
    scale = head_dim**-0.5

    output = prefill_attention(
        query,
        context.pool.keys,
        context.pool.values,
        context.block_tables,
        torch.tensor(first_rows, dtype=torch.int32),
        context.seq_lens,
        scale=scale,
        sliding_window=window,
    )

    assert output.dtype == dtype
    for index, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        rows = slice(first_rows[index], first_rows[index + 1])
        if new[index]:
            expected = plain_attention(query[rows], key, value, scale, window)
            assert rms_ratio(output[rows], expected) < TOLERANCE[dtype]
    assert context.pool.poison_is_untouched()


def test_gather_brings_blocks_in_the_order_of_the_table() -> None:
    context = fill([48, 20], 2, 16, 8)
    gathered = gather_kv_cache(context.pool.keys, context.block_tables)
    assert gathered.shape == (2, 2, 48, 8)
    assert torch.equal(gathered[0].transpose(0, 1), context.keys[0])
    assert torch.equal(gathered[1, :, :20].transpose(0, 1), context.keys[1])
