from __future__ import annotations

import dataclasses

import pytest

from weir.core.kv_layout import KvLayout, LayoutFingerprint

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype="float32")


def test_a_block_of_the_default_model_is_720_kib() -> None:
    assert LAYOUT.token_bytes == 30 * 2 * 3 * 64 * 4
    assert LAYOUT.block_bytes == 720 * 1024


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert LAYOUT.blocks_for(num_tokens) == num_blocks


def test_block_size_is_no_part_of_the_fingerprint() -> None:
    other = dataclasses.replace(LAYOUT, block_size=64)
    assert LAYOUT.fingerprint("w") == other.fingerprint("w")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LayoutFingerprint)])
def test_a_difference_is_named(name: str) -> None:
    ours = LAYOUT.fingerprint("w")
    theirs = dataclasses.replace(ours, **{name: "other" if isinstance(getattr(ours, name), str) else 99})
    assert ours.first_difference(theirs) == name
    assert ours.first_difference(ours) is None


def test_of_several_differences_the_first_field_is_named() -> None:
    theirs = LayoutFingerprint(weights_hash="x", kv_dtype="int8", num_layers=1, num_kv_heads=1, head_dim=1)
    assert LAYOUT.fingerprint("w").first_difference(theirs) == "weights_hash"
