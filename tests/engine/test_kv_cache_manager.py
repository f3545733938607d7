"""KvCacheManager: exact block ids, promises, holds."""

from __future__ import annotations

import pytest

from tests.fakes.model_runner import make_request
from weir.core.block_hash import hash_blocks, root_hash
from weir.engine.kv_cache_manager import KvCacheManager, PrefixMatch
from weir.engine.sequence import PrefillChoice, Sequence


def make_sequence(
    name: str, num_tokens: int, *, first: int = 0, holds: tuple[str, ...] = (), **fields: object
) -> Sequence:
    request = make_request(name, [(first + index) % 40 for index in range(num_tokens)], **fields)  # type: ignore[arg-type]
    choices = tuple(PrefillChoice(choice_index=index, hold_id=hold) for index, hold in enumerate(holds))
    return Sequence(request, arrival=0, arrived_s=0.0, choices=choices)


def compute(cache: KvCacheManager, sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed_tokens = num_tokens
    cache.publish(sequence)


def admit(cache: KvCacheManager, sequence: Sequence) -> PrefixMatch:
    match = cache.match(sequence, max_tokens=sequence.num_tokens - 1)
    assert cache.allocate(sequence, match, keep_watermark=False)
    return match


def test_table_covers_all_known_tokens_from_the_start() -> None:
    cache = KvCacheManager(8, 4)
    sequence = make_sequence("a", 10)
    admit(cache, sequence)
    assert sequence.block_ids == [0, 1, 2]
    cache.check_integrity()


def test_only_computed_full_blocks_are_published() -> None:
    cache = KvCacheManager(8, 4)
    sequence = make_sequence("a", 10)
    admit(cache, sequence)
    hashes = hash_blocks(sequence.token_ids, 4, parent=root_hash())
    for num_computed, num_published in ((3, 0), (4, 1), (7, 1), (10, 2)):
        compute(cache, sequence, num_computed)
        assert cache.pool.content() == hashes[:num_published]
        cache.check_integrity()


def test_match_finds_without_changing() -> None:
    cache = KvCacheManager(8, 4)
    first = make_sequence("a", 10)
    admit(cache, first)
    compute(cache, first, 10)
    again = make_sequence("b", 10)
    shared = cache.match(again, max_tokens=9)
    assert (shared.block_ids, shared.num_tokens, shared.num_free) == ((0, 1), 8, 0)
    cache.release(first)
    before = list(cache.pool.free_block_ids())
    assert cache.match(again, max_tokens=9).num_free == 2
    assert cache.match(again, max_tokens=7).block_ids == (0,)
    assert list(cache.pool.free_block_ids()) == before == [2, 3, 4, 5, 6, 7, 1, 0]


def test_hit_shares_blocks_and_allocates_the_rest() -> None:
    cache = KvCacheManager(8, 4)
    first = make_sequence("a", 10)
    admit(cache, first)
    compute(cache, first, 10)
    second = make_sequence("b", 13)
    admit(cache, second)
    assert second.block_ids == [0, 1, 3, 4]
    assert second.num_computed_tokens == 8
    assert [cache.pool.ref_count(block_id) for block_id in range(5)] == [2, 2, 1, 1, 1]
    cache.check_integrity()
    cache.release(first)
    cache.release(second)
    assert list(cache.pool.free_block_ids()) == [3, 4, 2, 5, 6, 7, 1, 0]


def test_matched_free_blocks_count_as_needed() -> None:
    cache = KvCacheManager(3, 4)
    first = make_sequence("a", 9)
    admit(cache, first)
    compute(cache, first, 9)
    cache.release(first)
    longer = make_sequence("b", 13)
    shared = cache.match(longer, max_tokens=12)
    assert shared.num_free == 2
    assert not cache.allocate(longer, shared, keep_watermark=False)
    assert cache.pool.num_free == 3
    cache.check_integrity()


def test_sequence_that_wants_prompt_logprobs_matches_nothing() -> None:
    cache = KvCacheManager(8, 4)
    first = make_sequence("a", 10)
    admit(cache, first)
    compute(cache, first, 10)
    asking = make_sequence("b", 10, prompt_logprobs=1)
    assert cache.match(asking, max_tokens=9) == PrefixMatch()
    asking.num_prompt_logprobs = 9
    assert cache.match(asking, max_tokens=9).num_tokens == 8


@pytest.mark.parametrize("fields", [{"cache_salt": "x"}, {"adapter": "x"}])
def test_other_root_matches_nothing(fields: dict[str, object]) -> None:
    cache = KvCacheManager(8, 4)
    first = make_sequence("a", 10)
    admit(cache, first)
    compute(cache, first, 10)
    assert cache.match(make_sequence("b", 10, **fields), max_tokens=9) == PrefixMatch()


def test_without_prefix_caching_nothing_is_hashed() -> None:
    cache = KvCacheManager(8, 4, enable_prefix_caching=False)
    sequence = make_sequence("a", 10)
    admit(cache, sequence)
    compute(cache, sequence, 10)
    assert sequence.block_hashes == []
    assert cache.pool.content() == ()


def test_growth_takes_a_block_only_when_one_is_full() -> None:
    cache = KvCacheManager(4, 4)
    sequence = make_sequence("a", 8)
    admit(cache, sequence)
    for expected in ([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]):
        sequence.append(1)
        assert cache.grow(sequence)
        assert sequence.block_ids == expected
    for _ in range(3):
        sequence.append(1)
        assert cache.grow(sequence)
    sequence.append(1)
    assert not cache.grow(sequence)
    cache.check_integrity()


def test_claimed_blocks_are_nobody_elses() -> None:
    cache = KvCacheManager(6, 4)
    claimed = make_sequence("c", 8)
    assert cache.claim(claimed, PrefixMatch(), keep_watermark=False)
    assert claimed.num_claimed_blocks == 3, "the first new token has a block too"
    assert (cache.pool.num_free, cache.num_available_blocks) == (6, 3)
    other = make_sequence("o", 13, first=20)
    assert not cache.allocate(other, PrefixMatch(), keep_watermark=False)
    cache.check_integrity()
    cache.allocate_claimed(claimed)
    assert claimed.block_ids == [0, 1, 2]
    assert cache.num_available_blocks == 3
    cache.check_integrity()
    cache.release(claimed)
    assert cache.num_available_blocks == 6


def test_claim_released_before_allocation_gives_its_promise_back() -> None:
    cache = KvCacheManager(6, 4)
    claimed = make_sequence("c", 8)
    assert cache.claim(claimed, PrefixMatch(), keep_watermark=False)
    cache.release(claimed)
    assert cache.num_available_blocks == 6
    cache.check_integrity()


def test_watermark_leaves_room_to_grow() -> None:
    cache = KvCacheManager(300, 4)
    sequence = make_sequence("a", 4 * 298)
    assert not cache.allocate(sequence, PrefixMatch(), keep_watermark=True)
    assert cache.allocate(sequence, PrefixMatch(), keep_watermark=False)


def test_holds_name_every_block_of_the_table() -> None:
    cache = KvCacheManager(8, 4)
    sequence = make_sequence("a", 10, holds=("h0", "h1"))
    admit(cache, sequence)
    compute(cache, sequence, 10)
    assert [cache.pool.ref_count(block_id) for block_id in range(3)] == [3, 3, 3]
    assert cache.num_held_blocks == 3
    cache.release(sequence)
    cache.check_integrity()
    assert cache.release_hold("h0")
    assert not cache.release_hold("h0")
    assert (cache.num_held_blocks, cache.pool.num_free) == (3, 5)
    assert cache.release_hold("h1")
    assert (cache.num_held_blocks, cache.pool.num_free) == (0, 8)
    assert list(cache.pool.free_block_ids()) == [2, 3, 4, 5, 6, 7, 1, 0]
    cache.check_integrity()


@pytest.mark.parametrize("break_it", ["lost table", "stray reference", "early hash", "claim"])
def test_check_integrity_sees_broken_laws(break_it: str) -> None:
    cache = KvCacheManager(8, 4)
    sequence = make_sequence("a", 10)
    admit(cache, sequence)
    compute(cache, sequence, 10)
    cache.check_integrity()
    match break_it:
        case "lost table":
            cache._owners.clear()
        case "stray reference":
            cache.pool.acquire([1])
        case "early hash":
            sequence.num_computed_tokens = 5
        case "claim":
            cache._num_claimed = 1
    with pytest.raises(AssertionError):
        cache.check_integrity()
