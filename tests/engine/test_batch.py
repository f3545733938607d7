from __future__ import annotations

import numpy as np
import pytest

from weir.engine.batch import BatchArrays, ScheduledSequence


def scheduled(
    name: str, token_ids: tuple[int, ...], start: int, block_ids: list[int], num_logits: int
) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=name, token_ids=token_ids, start=start, block_ids=block_ids, num_logits=num_logits
    )


def test_rows_put_decodes_first_longest_first_and_logits_keep_the_given_order() -> None:
    batch = BatchArrays.from_scheduled(
        [
            scheduled("prefill", (10, 11, 12), 2, [7, 5], 1),
            scheduled("short decode", (20,), 3, [1], 1),
            scheduled("chunk", (30, 31), 0, [9, 8], 0),
            scheduled("long decode", (40,), 8, [2, 3, 4], 1),
            scheduled("prompt logprobs", (50, 51), 4, [0, 6], 2),
        ],
        block_size=4,
    )
    assert batch.num_seqs == 5
    assert batch.num_decodes == 2
    assert batch.input_ids.tolist() == [40, 20, 10, 11, 12, 30, 31, 50, 51]
    assert batch.positions.tolist() == [8, 3, 2, 3, 4, 0, 1, 4, 5]
    assert batch.slots.tolist() == [16, 7, 30, 31, 20, 36, 37, 24, 25]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 5, 7, 9]
    assert batch.seq_lens.tolist() == [9, 4, 5, 2, 6]
    assert batch.block_tables.tolist() == [[2, 3, 4], [1, 1, 1], [7, 5, 7], [9, 9, 9], [0, 6, 0]]
    assert batch.logits_indices.tolist() == [4, 1, 0, 7, 8]


def test_dtypes_are_what_kernels_take() -> None:
    batch = BatchArrays.from_scheduled([scheduled("a", (1, 2), 0, [3], 0)], 16)
    for tensor in (batch.input_ids, batch.positions, batch.slots, batch.logits_indices):
        assert tensor.dtype == np.int64
    for tensor in (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables):
        assert tensor.dtype == np.int32
    assert batch.logits_indices.shape == (0,)


def test_slots_of_large_pools_do_not_overflow() -> None:
    batch = BatchArrays.from_scheduled([scheduled("a", (1,), 255, [20_000_000], 1)], 256)
    assert batch.slots.tolist() == [20_000_000 * 256 + 255]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_chunk_across_blocks_goes_where_the_table_says(block_size: int) -> None:
    table = list(range(40, 0, -1))
    batch = BatchArrays.from_scheduled([scheduled("a", tuple(range(20)), 5, table, 20)], block_size)
    expected = [table[position // block_size] * block_size + position % block_size for position in range(5, 25)]
    assert batch.slots.tolist() == expected
    assert batch.logits_indices.tolist() == list(range(20))


def test_a_table_that_does_not_cover_its_tokens_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="does not cover"):
        BatchArrays.from_scheduled([scheduled("a", (1, 2), 3, [0], 1)], 4)
