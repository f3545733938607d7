"""The CPU's attention op against attention the plain way, over caches whose every other slot is NaN."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.cpu.plan import Plan
from kernels.paged_attention import paged_attention_cpu
from tests.kernels.cpu_library import SETS, given, library
from tests.kernels.paged_pool import Context, fill, plain_attention, rms_ratio

LENGTHS = [130, 65, 64, 63, 33, 17, 7, 2, 1]


def attend(
    instruction_set: str, context: Context, queries: list[torch.Tensor], *, window: int | None, num_threads: int
) -> list[torch.Tensor]:
    """Attention of each sequence's last tokens, [num_queries, num_heads, head_dim] each."""
    pool = context.pool
    counts = [len(query) for query in queries]
    num_tokens, head_dim = sum(counts), queries[0].shape[2]
    unread = torch.full((num_tokens, 2 * pool.keys.shape[1] * head_dim), float("nan"))
    rows = torch.cat((torch.cat(queries).flatten(1), unread), dim=1)
    plan = Plan(library(instruction_set), num_tokens, 1)
    paged_attention_cpu(given(plan, rows), pool.keys, pool.values, sliding_window=window)
    plan.prepare(pool.whole, num_threads)
    starts = torch.tensor([0, *counts]).cumsum(0)
    lengths = context.seq_lens.tolist()
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(lengths, counts, strict=True)])
    try:
        result = plan.run(
            SimpleNamespace(
                input_ids=torch.arange(num_tokens),
                positions=positions,
                slots=positions,
                cu_seqlens_q=starts.int(),
                seq_lens=context.seq_lens,
                block_tables=context.block_tables,
                logits_indices=torch.zeros(0, dtype=torch.int64),
            )
        )
        return list(result.clone().view(num_tokens, -1, head_dim).split(counts))
    finally:
        plan.close()


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(1, 1, 64), (2, 4, 40), (1, 5, 64), (2, 3, 128)])
@pytest.mark.parametrize(
    ("block_size", "dtype"), [(1, torch.float32), (16, torch.float16), (256, torch.bfloat16), (16, torch.int8)]
)
def test_attention_equals_plain_attention(
    instruction_set: str,
    dtype: torch.dtype,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    is_prefill: bool,
    window: int | None,
) -> None:
    torch.manual_seed(0)
    context = fill(LENGTHS, num_kv_heads, block_size, head_dim, dtype)
    counts = [min(length, 40) if is_prefill else 1 for length in LENGTHS]
    queries = [torch.randn(count, num_kv_heads * group, head_dim) for count in counts]

    outputs = attend(instruction_set, context, queries, window=window, num_threads=2)

    for output, query, key, value in zip(outputs, queries, context.keys, context.values, strict=True):
        assert rms_ratio(output, plain_attention(query, key, value, head_dim**-0.5, window)) < 1e-5
    assert context.pool.poison_is_untouched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_of_attention_is_the_same_bits_alone_as_in_a_long_prompt(
    instruction_set: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    length, block_size = 200, 16
    context = fill([length], 2, block_size, 64, dtype)
    query = torch.randn(length, 6, 64)
    (whole,) = attend(instruction_set, context, [query], window=window, num_threads=2)
    for position in (0, 1, 63, 64, 65, 130, 199):
        until = Context(
            context.pool,
            context.block_tables,
            torch.tensor([position + 1], dtype=torch.int32),
            context.keys,
            context.values,
        )
        (alone,) = attend(instruction_set, until, [query[position : position + 1]], window=window, num_threads=1)
        assert torch.equal(alone[0], whole[position])
