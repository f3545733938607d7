from __future__ import annotations

import pytest
import torch

from weir.core.errors import UnsupportedFeatureError
from weir.core.kv_layout import KvLayout
from weir.engine.paged_kv_cache import PagedKvCache

CPU = torch.device("cpu")


def make_cache(block_size: int = 4, dtype: str = "float32", num_blocks: int = 8) -> PagedKvCache:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_size=block_size, kv_dtype=dtype)
    return PagedKvCache(layout, num_blocks, CPU)


def fill(cache: PagedKvCache, block_ids: list[int], num_tokens: int) -> None:
    """Give every element a value that says whose it is: position, layer, K or V, head, element."""
    layout = cache.layout
    element = torch.arange(3 * 2 * 2 * cache.tensor.shape[5], dtype=torch.float32).view(3, 2, 2, -1) / 64
    for position in range(num_tokens):
        block, offset = block_ids[position // layout.block_size], position % layout.block_size
        values = (position + 64 * element) % 127 if layout.kv_dtype == "int8" else position + element
        cache.tensor[block, :, :, :, offset] = values.to(cache.tensor.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_block_is_one_contiguous_slab_of_block_bytes(dtype: str) -> None:
    cache = make_cache(dtype=dtype)
    torch.manual_seed(0)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    assert cache.tensor.shape == (8, 3, 2, 2, 4, 5)
    view = cache.block_view(5)
    assert view.nbytes == cache.layout.block_bytes
    assert bytes(view) == cache.tensor[5].contiguous().view(torch.uint8).numpy().tobytes()


def test_bytes_written_through_a_view_are_the_blocks_values() -> None:
    cache = make_cache()
    cache.tensor.zero_()
    values = torch.randn(3, 2, 2, 4, 5)
    cache.block_view(2)[:] = values.numpy().tobytes()
    assert torch.equal(cache.tensor[2], values)
    assert torch.equal(cache.layer(1).keys[2], values[1, 0])
    assert torch.equal(cache.layer(2).values[2], values[2, 1])
    assert not cache.tensor[[0, 1, 3, 4, 5, 6, 7]].any()


def test_memory_starts_as_zeros() -> None:
    assert not make_cache().tensor.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("source_block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_tokens_of_another_block_size_land_by_their_position(
    dtype: str, source_block_size: int, block_size: int
) -> None:
    num_tokens, skipped = 15, 2
    source = make_cache(source_block_size, dtype, num_blocks=16)
    fill(source, list(range(16)), num_tokens)
    target = make_cache(block_size, dtype, num_blocks=20)
    table = [19 - index for index in range(16)]
    for block in range(-(-num_tokens // source_block_size)):
        first = max(block * source_block_size, skipped)
        end = min((block + 1) * source_block_size, num_tokens)
        if first < end:
            payload = memoryview(bytes(source.block_view(block)))
            target.write_tokens(table, first, end - first, payload, source_block_size)

    expected = make_cache(block_size, dtype, num_blocks=20)
    fill(expected, table, num_tokens)
    for position in range(skipped):
        expected.tensor[table[position // block_size], ..., position % block_size, :] = 0
    assert torch.equal(target.tensor, expected.tensor)


def test_tokens_of_two_source_blocks_at_once_are_a_fault() -> None:
    cache = make_cache()
    with pytest.raises(AssertionError, match="one source block"):
        cache.write_tokens([0, 1], 6, 4, memoryview(bytes(2 * cache.layout.block_bytes)), 8)


def test_blocks_outside_host_memory_have_no_view() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, kv_dtype="float32")
    with pytest.raises(UnsupportedFeatureError, match="meta"):
        PagedKvCache(layout, 2, torch.device("meta")).block_view(0)
