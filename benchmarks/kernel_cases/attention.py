"""Attention over a paged cache, and what is written to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as functional

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import DTYPE, ELEMENT_BYTES, KernelCase, Trial, Work, random_rows
from kernels.decode_attention import decode_attention_reference
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.gpu.decode_attention import decode_attention_triton
from kernels.gpu.prefill_attention import prefill_attention_triton
from kernels.gpu.rotate_and_store import rotate_and_store_triton
from kernels.prefill_attention import prefill_attention_reference
from kernels.rotate_and_store import rotate_and_store_reference
from tests.kernels.paged_pool import rms_ratio

NUM_LAYERS = 4
"""Of a pool, of which one is used: blocks lie apart as in a model, though not as far."""

BEYOND_INT32 = (1 << 31) // (NUM_LAYERS * 2 * 8 * 16 * 128) + 1
"""Blocks of eight heads of 128, sixteen tokens each, after which an element's number has more than 31 bits."""

FAR = "beyond 2^31 elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def query_elements(self) -> int:
        """Of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"


LLAMA_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
QWEN_30B_A3B = Heads(num_heads=32, num_kv_heads=4, head_dim=128)
SMALL = Heads(num_heads=2, num_kv_heads=1, head_dim=32)


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer of a pool whose other layers, and blocks that no sequence has, are NaN."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    kv_scales: torch.Tensor | None

    @classmethod
    def make(
        cls,
        heads: Heads,
        num_seqs: int,
        context: int,
        device: torch.device,
        *,
        skipped_blocks: int = 0,
        dtype: torch.dtype = DTYPE,
    ) -> Pool:
        """Random tokens of `num_seqs` sequences, in blocks in random order, all behind `skipped_blocks`."""
        blocks_each = -(-context // heads.block_size)
        num_blocks = skipped_blocks + num_seqs * blocks_each
        shape = (num_blocks, NUM_LAYERS, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
        whole = torch.empty(shape, dtype=dtype, device=device).fill_(float("nan"))
        used = whole[skipped_blocks:, 1]
        used.copy_(random_rows(*used.shape, device=device))
        scales = 0.5 + torch.rand(2, heads.num_kv_heads, device=device)
        order = torch.randperm(num_seqs * blocks_each, device=device) + skipped_blocks
        return cls(
            keys=whole[:, 1, 0],
            values=whole[:, 1, 1],
            block_tables=order.view(num_seqs, blocks_each).to(torch.int32),
            seq_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
            kv_scales=scales if dtype == FLOAT8 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedWork(Work):
    """What has to do with a pool.

    Attributes:
        context: tokens of a sequence.
        skipped_blocks: lie before all others in the pool.
    """

    heads: Heads
    context: int
    skipped_blocks: int = 0
    kv_dtype: torch.dtype = DTYPE

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9) if self.kv_dtype == FLOAT8 else (0, 0)

    @property
    def cached(self) -> str:
        """The heads, for people."""
        return f"{self.heads}, in {str(self.kv_dtype).removeprefix('torch.')}"

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        return self.heads.kv_elements * self.kv_dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """Of a token, as its result has."""
        return self.heads.query_elements * ELEMENT_BYTES

    def make_pool(self, num_seqs: int, device: torch.device) -> Pool:
        return Pool.make(
            self.heads, num_seqs, self.context, device, skipped_blocks=self.skipped_blocks, dtype=self.kv_dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttention(PagedWork):
    kernels: ClassVar = ("decode_attention", "attention_tile")
    does: ClassVar = "one new token a sequence attends to its paged context"
    bytes_formula: ClassVar = "2 · tokens · KV heads · dim · c + 2 · sequences · heads · dim · e"
    flops_formula: ClassVar = "4 · tokens · heads · dim"

    num_seqs: int

    @property
    def shape(self) -> str:
        return f"{self.num_seqs} sequences of {self.context:,} tokens, {self.cached}"

    @property
    def floor(self) -> Floor:
        num_tokens = self.num_seqs * self.context
        num_bytes = num_tokens * self.kv_bytes + 2 * self.num_seqs * self.query_bytes
        return Floor(num_bytes=num_bytes, flops=4 * num_tokens * self.heads.query_elements)

    def make(self, device: torch.device) -> Trial:
        heads = self.heads
        pool = self.make_pool(self.num_seqs, device)
        query = random_rows(self.num_seqs, heads.num_heads, heads.head_dim, device=device)
        arguments = (query, pool.keys, pool.values, pool.block_tables, pool.seq_lens)
        launch = partial(decode_attention_triton, *arguments, scale=heads.head_dim**-0.5, kv_scales=pool.kv_scales)
        plain = partial(decode_attention_reference, *arguments, scale=heads.head_dim**-0.5, kv_scales=pool.kv_scales)
        return Trial(launch=launch, error=lambda: rms_ratio(launch(), plain()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttention(PagedWork):
    """The last `num_new` of `context` tokens of one sequence."""

    kernels: ClassVar = ("prefill_attention", "attention_tile")
    does: ClassVar = "new tokens of a sequence attend to its paged context and to those before them"
    bytes_formula: ClassVar = "2 · context · KV heads · dim · c + 2 · new · heads · dim · e"
    flops_formula: ClassVar = "4 · (new · (context - new) + new · (new + 1) / 2) · heads · dim"

    num_new: int

    @property
    def shape(self) -> str:
        return f"{self.num_new:,} new of {self.context:,} tokens, {self.cached}"

    @property
    def floor(self) -> Floor:
        new = self.num_new
        pairs = new * (self.context - new) + new * (new + 1) // 2
        num_bytes = self.context * self.kv_bytes + 2 * new * self.query_bytes
        return Floor(num_bytes=num_bytes, flops=4 * pairs * self.heads.query_elements)

    def make(self, device: torch.device) -> Trial:
        heads = self.heads
        pool = self.make_pool(1, device)
        query = random_rows(self.num_new, heads.num_heads, heads.head_dim, device=device)
        starts = torch.tensor([0, self.num_new], dtype=torch.int32, device=device)
        arguments = (query, pool.keys, pool.values, pool.block_tables, starts, pool.seq_lens)
        launch = partial(prefill_attention_triton, *arguments, scale=heads.head_dim**-0.5, kv_scales=pool.kv_scales)
        plain = partial(prefill_attention_reference, *arguments, scale=heads.head_dim**-0.5, kv_scales=pool.kv_scales)
        return Trial(launch=launch, error=lambda: rms_ratio(launch(), plain()), rivals=self._rivals(query))

    def _rivals(self, query: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Where there is nothing before the new tokens: torch's own, over contiguous keys and values."""
        if self.num_new < self.context:
            return {}
        heads = self.heads
        turned = query.transpose(0, 1)[None]
        shape = (1, heads.num_kv_heads, self.context, heads.head_dim)
        key, value = (random_rows(*shape, device=query.device) for _ in range(2))
        attend = functional.scaled_dot_product_attention
        return {"torch, not paged": partial(attend, turned, key, value, is_causal=True, enable_gqa=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateAndStore(PagedWork):
    """Each token is the last of a sequence of `context`."""

    kernels: ClassVar = ("rotate_and_store",)
    does: ClassVar = "norm of queries and keys, rotation, keys and values to the cache"
    bytes_formula: ClassVar = "tokens · ((2 · heads + 3 · KV heads) · dim · e + 2 · KV heads · dim · c + 4 · dim + 16)"

    num_tokens: int

    @property
    def shape(self) -> str:
        return f"{self.num_tokens:,} tokens, {self.cached}, with norms"

    @property
    def floor(self) -> Floor:
        heads = self.heads
        num_read = heads.query_elements + heads.kv_elements
        num_turned = heads.query_elements + heads.kv_elements // 2
        angles_and_places = 4 * heads.head_dim + 16
        each = (num_read + num_turned) * ELEMENT_BYTES + self.kv_bytes + angles_and_places
        return Floor(num_bytes=self.num_tokens * each)

    def make(self, device: torch.device) -> Trial:
        heads = self.heads
        pool = self.make_pool(self.num_tokens, device)
        rows = random_rows(self.num_tokens, heads.query_elements + heads.kv_elements, device=device)
        cos_sin = torch.randn(self.context, heads.head_dim, device=device)
        positions = torch.full((self.num_tokens,), self.context - 1, device=device)
        slots = pool.block_tables[:, -1].long() * heads.block_size + (self.context - 1) % heads.block_size
        norms = (random_rows(heads.head_dim, device=device), random_rows(heads.head_dim, device=device))
        arguments = (positions, slots, cos_sin, pool.keys, pool.values, norms, 1e-6, pool.kv_scales)

        def changed(op: Callable[..., torch.Tensor]) -> torch.Tensor:
            """Rows, and what is in their slots then."""
            turned = op(rows.clone(), *arguments)
            blocks, offsets = slots // heads.block_size, slots % heads.block_size
            stored = [cache[blocks, :, offsets].float().flatten(1) for cache in (pool.keys, pool.values)]
            return torch.cat((turned.float(), *stored), dim=1)

        return Trial(
            launch=partial(rotate_and_store_triton, rows, *arguments),
            error=lambda: rms_ratio(changed(rotate_and_store_triton), changed(rotate_and_store_reference)),
        )


def cases() -> Iterator[KernelCase]:
    for name, goal, decode in (
        ("batch 64, GQA 8", 0.85, DecodeAttention(heads=QWEN_30B_A3B, num_seqs=64, context=4096)),
        ("batch 64, Llama-3-8B", None, DecodeAttention(heads=LLAMA_8B, num_seqs=64, context=4096)),
        ("batch 64, float8", None, DecodeAttention(heads=LLAMA_8B, num_seqs=64, context=4096, kv_dtype=FLOAT8)),
        ("batch 1, Llama-3-8B", None, DecodeAttention(heads=LLAMA_8B, num_seqs=1, context=4096)),
        (FAR, None, DecodeAttention(heads=LLAMA_8B, num_seqs=8, context=4096, skipped_blocks=BEYOND_INT32)),
    ):
        yield _case("decode_attention", name, decode, replace(decode, num_seqs=2), goal)
    for name, goal, prefill in (
        ("8k, Llama-3-8B", 0.6, PrefillAttention(heads=LLAMA_8B, num_new=8192, context=8192)),
        ("8k, float8", None, PrefillAttention(heads=LLAMA_8B, num_new=8192, context=8192, kv_dtype=FLOAT8)),
        ("last 2k of 8k", None, PrefillAttention(heads=LLAMA_8B, num_new=2048, context=8192)),
        (FAR, None, PrefillAttention(heads=LLAMA_8B, num_new=1024, context=2048, skipped_blocks=BEYOND_INT32)),
    ):
        yield _case("prefill_attention", name, prefill, replace(prefill, num_new=20), goal)
    for name, rotate in (
        ("8k tokens", RotateAndStore(heads=LLAMA_8B, num_tokens=8192, context=16)),
        ("8k tokens, float8", RotateAndStore(heads=LLAMA_8B, num_tokens=8192, context=16, kv_dtype=FLOAT8)),
        ("64 tokens", RotateAndStore(heads=LLAMA_8B, num_tokens=64, context=16)),
        (FAR, RotateAndStore(heads=LLAMA_8B, num_tokens=64, context=16, skipped_blocks=BEYOND_INT32)),
    ):
        yield _case("rotate_and_store", name, rotate, replace(rotate, num_tokens=2))


def _case(op: str, name: str, work: PagedWork, fewer: PagedWork, goal: float | None = None) -> KernelCase:
    """Of those far away only the results are looked at: they are like others, and have much memory."""
    small = replace(fewer, heads=SMALL, context=40, skipped_blocks=3)
    return KernelCase(op=op, name=name, work=work, small=small, goal=goal, is_timed=not work.skipped_blocks)
