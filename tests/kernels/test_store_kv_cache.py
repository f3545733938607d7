from __future__ import annotations

import pytest
import torch

from kernels.eight_bit_heads import dequantize_heads, quantize_heads
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.gather_kv_cache import gather_kv_cache
from kernels.store_kv_cache import store_kv_cache
from tests.kernels.paged_pool import make_pool, rms_ratio


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 65])
def test_every_token_lands_in_its_slot_and_nowhere_else(block_size: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    num_blocks = -(-2 * num_tokens // block_size) + 1
    pool = make_pool(num_blocks, 2, block_size, 40)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    heads = torch.randn(num_tokens, 6, 40)
    key, value = heads[:, 2:4], heads[:, 4:]

    store_kv_cache(key, value, pool.keys, pool.values, slots)

    expected_keys, expected_values = torch.zeros(pool.keys.shape), torch.zeros(pool.values.shape)
    for token, slot in enumerate(slots.tolist()):
        expected_keys[slot // block_size, :, slot % block_size] = key[token]
        expected_values[slot // block_size, :, slot % block_size] = value[token]
    assert torch.equal(pool.keys, expected_keys)
    assert torch.equal(pool.values, expected_values)
    assert pool.poison_is_untouched()


def test_of_a_row_of_padding_nothing_is_stored() -> None:
    padded, plain = (make_pool(2, 2, 4, 8) for _ in range(2))
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    store_kv_cache(key, value, padded.keys, padded.values, torch.tensor([-1, 5, -1, 0]))
    store_kv_cache(key[[1, 3]], value[[1, 3]], plain.keys, plain.values, torch.tensor([5, 0]))
    assert torch.equal(padded.keys, plain.keys)
    assert torch.equal(padded.values, plain.values)
    assert padded.poison_is_untouched()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_smaller_cache_dtype_rounds(dtype: torch.dtype) -> None:
    pool = make_pool(2, 1, 4, 8, dtype)
    key, value = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    store_kv_cache(key, value, pool.keys, pool.values, torch.tensor([0, 5, 7]))
    assert torch.equal(pool.keys[1, :, 1], key[1].to(dtype))
    assert torch.equal(pool.values[1, :, 3], value[2].to(dtype))


def test_an_eight_bit_cache_gives_back_each_head_within_half_its_scale() -> None:
    pool = make_pool(3, 2, 4, 40, torch.int8)
    key, value = torch.randn(5, 2, 40), torch.randn(5, 2, 40) * 1e4
    value[4, 1] = 0
    slots = torch.tensor([0, 5, 7, 8, 11])
    store_kv_cache(key, value, pool.keys, pool.values, slots)
    for new, cache in ((key, pool.keys), (value, pool.values)):
        found = gather_kv_cache(cache, torch.tensor([[0, 1, 2]]))[0][:, slots].transpose(0, 1)
        assert torch.equal(found, dequantize_heads(quantize_heads(new)))
        assert ((found - new).abs() <= new.abs().amax(dim=2, keepdim=True) / 254 * 1.0001).all()
    assert pool.poison_is_untouched()


def test_a_float8_cache_divides_by_each_heads_scale_and_ends_at_its_largest_number() -> None:
    torch.manual_seed(0)
    pool = make_pool(3, 2, 4, 40, FLOAT8)
    kv_scales = torch.tensor([[1.0, 1e-3], [1e3, 0.5]])
    heads = torch.randn(2, 5, 2, 40) * kv_scales[:, None, :, None] * 20
    heads[0, 0, 0, :3], heads[0, 1, 1, 0] = torch.tensor([1e9, -1e9, float("inf")]), float("nan")
    slots = torch.tensor([0, 5, -1, 8, 11])
    store_kv_cache(*heads, pool.keys, pool.values, slots, kv_scales)
    kept = [0, 1, 3, 4]
    found = [
        gather_kv_cache(cache, torch.tensor([[0, 1, 2]]), scales)[0][:, slots[kept]].transpose(0, 1)
        for cache, scales in zip((pool.keys, pool.values), kv_scales, strict=True)
    ]
    assert found[0][0, 0, :3].tolist() == [448.0, -448.0, 448.0]
    assert found[0][1, 1, 0].isnan()
    assert rms_ratio(found[0][2:], heads[0, kept[2:]]) < 4e-2
    assert rms_ratio(found[1], heads[1, kept]) < 4e-2
    assert pool.poison_is_untouched()
