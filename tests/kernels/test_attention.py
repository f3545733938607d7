"""Both attention ops, in plain torch and in Triton, against attention the plain way, over caches whose every other slot
is NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.decode_attention import decode_attention_reference
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.gather_kv_cache import gather_kv_cache
from kernels.gpu.decode_attention import decode_attention_triton
from kernels.gpu.prefill_attention import prefill_attention_triton
from kernels.prefill_attention import prefill_attention_reference
from tests.kernels.paged_pool import TOLERANCE, fill, plain_attention, rms_ratio

DECODE = pytest.mark.parametrize("decode_attention", [decode_attention_reference, decode_attention_triton])
PREFILL = pytest.mark.parametrize("prefill_attention", [prefill_attention_reference, prefill_attention_triton])
Attention = Callable[..., torch.Tensor]
LENGTHS = [1, 7, 63, 65, 64, 2, 130, 16, 17, 31, 33]
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DECODE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 4, 40), (1, 5, 64)])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_decode_equals_plain_attention(
    decode_attention: Attention,
    dtype: torch.dtype,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
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


@DECODE
@pytest.mark.parametrize("window", [1, 5, 64])
def test_decode_window_sees_only_the_last_tokens(decode_attention: Attention, window: int) -> None:
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


@DECODE
def test_decode_does_not_depend_on_the_neighbours(decode_attention: Attention) -> None:
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


@PREFILL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 4, 40), (1, 5, 64)])
def test_prefill_equals_plain_attention(
    prefill_attention: Attention,
    dtype: torch.dtype,
    window: int | None,
    num_kv_heads: int,
    group: int,
    head_dim: int,
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


@pytest.mark.parametrize(("num_splits", "split_size"), [(1, None), (3, None), (None, 64), (None, 256)])
@pytest.mark.parametrize("window", [None, 70])
def test_decode_in_splits_equals_plain_attention(
    num_splits: int | None, split_size: int | None, window: int | None
) -> None:
    context = fill([1, 600, 64, 65, 300], 2, 16, 32)
    query = torch.randn(5, 6, 32)
    output = decode_attention_triton(
        query,
        context.pool.keys,
        context.pool.values,
        context.block_tables,
        context.seq_lens,
        scale=0.2,
        sliding_window=window,
        num_splits=num_splits,
        split_size=split_size,
    )
    for row, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        assert rms_ratio(output[row : row + 1], plain_attention(query[row : row + 1], key, value, 0.2, window)) < 1e-5


def test_with_a_fixed_split_size_decode_gives_the_same_bits_in_any_batch() -> None:
    context = fill([40, 300, 129], 2, 16, 32)
    query, pool = torch.randn(3, 4, 32), context.pool
    together = decode_attention_triton(
        query, pool.keys, pool.values, context.block_tables, context.seq_lens, scale=0.2, split_size=64
    )
    for row, length in enumerate(context.seq_lens.tolist()):
        only = slice(row, row + 1)
        narrow = context.block_tables[only, : -(-length // 16)].contiguous()
        alone = decode_attention_triton(
            query[only], pool.keys, pool.values, narrow, context.seq_lens[only], scale=0.2, split_size=64
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("window", [None, 3])
def test_decode_of_several_queries_is_causal_among_them(window: int | None) -> None:
    context = fill([3, 70, 129], 2, 16, 32)
    query = torch.randn(3 * 3, 6, 32)
    output = decode_attention_triton(
        query,
        context.pool.keys,
        context.pool.values,
        context.block_tables,
        context.seq_lens,
        scale=0.2,
        sliding_window=window,
        num_queries=3,
        num_splits=2,
    )
    for index, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        rows = slice(3 * index, 3 * index + 3)
        assert rms_ratio(output[rows], plain_attention(query[rows], key, value, 0.2, window)) < 1e-5


def test_a_cache_may_have_fewer_bits_than_the_queries() -> None:
    context = fill([70, 129], 2, 16, 32, torch.float16)
    pool = context.pool
    query = torch.randn(2, 4, 32)
    arguments = (pool.keys, pool.values, context.block_tables)
    decoded = decode_attention_triton(query, *arguments, context.seq_lens, scale=0.2)
    first_rows = torch.tensor([0, 1, 2], dtype=torch.int32)
    prefilled = prefill_attention_triton(query, *arguments, first_rows, context.seq_lens, scale=0.2)
    for row, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        expected = plain_attention(query[row : row + 1], key, value, 0.2)
        assert rms_ratio(decoded[row : row + 1], expected) < TOLERANCE[torch.float16]
        assert rms_ratio(prefilled[row : row + 1], expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("decode_attention", "prefill_attention"),
    [
        (decode_attention_reference, prefill_attention_reference),
        (partial(decode_attention_triton, num_splits=3), prefill_attention_triton),
        (partial(decode_attention_triton, num_splits=1), prefill_attention_triton),
    ],
)
def test_a_float8_cache_is_attended_to_by_its_scales(
    decode_attention: Attention, prefill_attention: Attention, dtype: torch.dtype
) -> None:
    context = fill([1, 300, 17], 2, 16, 40, FLOAT8)
    pool = context.pool
    arguments = (pool.keys, pool.values, context.block_tables)
    query = torch.randn(3, 6, 40).to(dtype)
    decoded = decode_attention(query, *arguments, context.seq_lens, scale=2.0, kv_scales=context.kv_scales)
    first_rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    prefilled = prefill_attention(
        query, *arguments, first_rows, context.seq_lens, scale=2.0, sliding_window=64, kv_scales=context.kv_scales
    )
    for row, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
        only = slice(row, row + 1)
        assert rms_ratio(decoded[only], plain_attention(query[only], key, value, 2.0)) < TOLERANCE[dtype]
        assert rms_ratio(prefilled[only], plain_attention(query[only], key, value, 2.0, 64)) < TOLERANCE[dtype]
    assert pool.poison_is_untouched()


@pytest.mark.parametrize(
    "decode_attention",
    [
        decode_attention_reference,
        partial(decode_attention_triton, num_splits=1),
        partial(decode_attention_triton, num_splits=2),
    ],
)
def test_an_empty_sequence_of_a_padded_batch_attends_to_nothing(decode_attention: Attention) -> None:
    context = fill([5, 70, 1], 1, 16, 32)
    arguments = (context.pool.keys, context.pool.values, context.block_tables)
    query, lengths = torch.randn(3, 2, 32), torch.tensor([0, 70, 0], dtype=torch.int32)
    output = decode_attention(query, *arguments, lengths, scale=0.2)
    assert torch.equal(output[[0, 2]], torch.zeros(2, 2, 32))
    expected = plain_attention(query[1:2], context.keys[1], context.values[1], 0.2)
    assert rms_ratio(output[1:2], expected) < 1e-5


@PREFILL
def test_an_empty_sequence_of_a_padded_prefill_changes_nothing(prefill_attention: Attention) -> None:
    context = fill([5, 70, 1], 1, 16, 32)
    arguments = (context.pool.keys, context.pool.values, context.block_tables)
    query, lengths = torch.randn(3, 2, 32), torch.tensor([0, 70, 0], dtype=torch.int32)
    output = prefill_attention(query, *arguments, torch.tensor([0, 0, 3, 3], dtype=torch.int32), lengths, scale=0.2)
    assert rms_ratio(output, plain_attention(query, context.keys[1], context.values[1], 0.2)) < 1e-5


def test_a_soft_cap_bends_scores_by_tanh() -> None:
    context = fill([40], 1, 16, 32)
    (key,), (value,) = context.keys, context.values
    query = 5 * torch.randn(40, 2, 32)
    scores = 2.0 * torch.tanh(torch.einsum("qhd,kgd->hqk", query, key) * 0.2 / 2.0)
    unseen = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = torch.einsum("hqk,kgd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), value)
    pool = context.pool
    decoded = decode_attention_triton(
        query[-1:], pool.keys, pool.values, context.block_tables, context.seq_lens, scale=0.2, soft_cap=2.0
    )
    prefilled = prefill_attention_triton(
        query,
        pool.keys,
        pool.values,
        context.block_tables,
        torch.tensor([0, 40], dtype=torch.int32),
        context.seq_lens,
        scale=0.2,
        soft_cap=2.0,
    )
    assert rms_ratio(prefilled, expected) < 1e-5
    assert rms_ratio(decoded, expected[-1:]) < 1e-5
