"""Paged caches for kernel tests, with poison wherever a kernel has no business, and attention the slow, plain way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.eight_bit_heads import SCALE_BYTES, dequantize_heads, quantize_heads
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.fp8_heads import quantize_fp8

NUM_LAYERS = 3
GUARD_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class PagedPool:
    """One layer of a block-major cache whose other layers and guard blocks at both ends are NaN.

    Attributes:
        whole: [guards + num_blocks + guards, layers, 2, num_kv_heads, block_size, width].
        keys, values: layer 1 without guards, [num_blocks, num_kv_heads, block_size, width].
    """

    whole: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def poison_is_untouched(self) -> bool:
        others = self.whole[:, [0, 2]]
        guards = torch.cat((self.whole[:GUARD_BLOCKS, 1], self.whole[-GUARD_BLOCKS:, 1]))
        return _is_poison(others) and _is_poison(guards)


def _poison(tensor: torch.Tensor) -> None:
    """NaN; as eight bits it is -1 all over, which makes every scale NaN."""
    tensor.fill_(-1 if tensor.dtype == torch.int8 else float("nan"))


def _is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor == -1).all() if tensor.dtype == torch.int8 else tensor.isnan().all())


def make_pool(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> PagedPool:
    """An empty layer: zeros in layer 1, NaN elsewhere."""
    width = head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim
    whole = torch.empty(num_blocks + 2 * GUARD_BLOCKS, NUM_LAYERS, 2, num_kv_heads, block_size, width, dtype=dtype)
    _poison(whole)
    inner = whole[GUARD_BLOCKS : GUARD_BLOCKS + num_blocks, 1]
    inner.zero_()
    return PagedPool(whole, inner[:, 0], inner[:, 1])


@dataclass(frozen=True, slots=True)
class Context:
    """Sequences stored in a pool, every slot that is not theirs NaN, and their plain K and V.

    Attributes:
        block_tables: [num_seqs, max_blocks] int32, padded with the sequence's own first block.
        keys, values: a sequence each, [length, num_kv_heads, head_dim].
        kv_scales: of a float8 cache, [2, num_kv_heads].
    """

    pool: PagedPool
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv_scales: torch.Tensor | None = None


def fill(
    lengths: list[int], num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Context:
    """Store random sequences in blocks in random order."""
    counts = [-(-length // block_size) for length in lengths]
    pool = make_pool(sum(counts), num_kv_heads, block_size, head_dim, dtype)
    _poison(pool.keys)
    _poison(pool.values)
    free = torch.randperm(sum(counts)).tolist()
    kv_scales = 0.01 + torch.rand(2, num_kv_heads) if dtype == FLOAT8 else None
    keys, values, tables = [], [], []
    for length, count in zip(lengths, counts, strict=True):
        table = [free.pop() for _ in range(count)]
        heads = torch.randn(2, length, num_kv_heads, head_dim)
        stored = _stored(heads, dtype, kv_scales)
        for position in range(length):
            block, offset = table[position // block_size], position % block_size
            pool.keys[block, :, offset] = stored[0, position]
            pool.values[block, :, offset] = stored[1, position]
        key, value = _meant(stored, kv_scales)
        keys.append(key)
        values.append(value)
        tables.append(table + [table[0]] * (max(counts) - count))
    return Context(
        pool=pool,
        block_tables=torch.tensor(tables, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        keys=keys,
        values=values,
        kv_scales=kv_scales,
    )


def _stored(heads: torch.Tensor, dtype: torch.dtype, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """Keys and values [2, length, num_kv_heads, head_dim] as a cache has them."""
    if kv_scales is not None:
        return torch.stack([quantize_fp8(each, scales) for each, scales in zip(heads, kv_scales, strict=True)])
    return quantize_heads(heads) if dtype == torch.int8 else heads.to(dtype)


def _meant(stored: torch.Tensor, kv_scales: torch.Tensor | None) -> torch.Tensor:
    if kv_scales is not None:
        return stored.float() * kv_scales[:, None, :, None]
    return dequantize_heads(stored) if stored.dtype == torch.int8 else stored


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attention of the last len(query) positions, one query and one head at a time, in float64."""
    output = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    first = len(keys) - len(query)
    for row in range(len(query)):
        end = first + row + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(query.shape[1]):
            scores = keys[start:end, head // group].double() @ query[row, head].double() * scale
            output[row, head] = torch.softmax(scores, 0) @ values[start:end, head // group].double()
    return output


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square of the difference over that of the expected."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
