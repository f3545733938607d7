from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir.core.block_hash import HASH_BYTES, hash_block, hash_blocks, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
KEYS = st.text(max_size=12)


@given(TOKENS, st.integers(1, 20))
def test_only_full_blocks_are_hashed(tokens: list[int], block_size: int) -> None:
    hashes = hash_blocks(tokens, block_size, parent=root_hash())
    assert len(hashes) == len(tokens) // block_size
    assert all(len(value) == HASH_BYTES for value in hashes)


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_equal_hash_means_equal_tokens_up_to_there(first: list[int], second: list[int], block_size: int) -> None:
    pairs = zip(
        hash_blocks(first, block_size, parent=root_hash()),
        hash_blocks(second, block_size, parent=root_hash()),
        strict=False,
    )
    for index, (left, right) in enumerate(pairs, start=1):
        assert (left == right) == (first[: index * block_size] == second[: index * block_size])


@given(TOKENS, st.integers(1, 20), st.integers(0, 70))
def test_a_chain_may_be_continued_from_any_block(tokens: list[int], block_size: int, cut: int) -> None:
    whole = hash_blocks(tokens, block_size, parent=root_hash())
    num_blocks = min(cut, len(whole))
    parent = whole[num_blocks - 1] if num_blocks else root_hash()
    assert whole[num_blocks:] == hash_blocks(tokens[num_blocks * block_size :], block_size, parent=parent)


@given(KEYS, KEYS, KEYS, KEYS)
def test_no_two_combinations_of_extra_keys_collide(adapter: str, salt: str, adapter2: str, salt2: str) -> None:
    is_same = (adapter, salt) == (adapter2, salt2)
    assert (root_hash(adapter=adapter, cache_salt=salt) == root_hash(adapter=adapter2, cache_salt=salt2)) == is_same


def test_a_key_moved_from_one_kind_to_the_other_is_another_key() -> None:
    roots = {
        root_hash(),
        root_hash(adapter="a"),
        root_hash(cache_salt="a"),
        root_hash(adapter="a", cache_salt="b"),
        root_hash(adapter="ab"),
        root_hash(adapter="b", cache_salt="a"),
        root_hash(cache_salt="ab"),
    }
    assert len(roots) == 7


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    root = root_hash()
    assert root.hex() == "84b3cf6c9b0797969e5376d14318b80b"
    assert hash_block(root, [1, 2, 2**32 - 1]).hex() == "156abe4969297f43351c379b14c07c58"
