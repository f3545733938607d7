"""KV memory of two workers: slabs with known bytes, which notice being read or written when they must not be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weir.core.kv_layout import KvLayout


def token_bytes_of(layout: KvLayout, token_index: int, seed: int) -> np.ndarray:
    """What one token holds `[num_layers, 2, num_kv_heads, head_dim]`, as float32; the same on every worker."""
    digest = hashlib.blake2b(f"{seed}/{token_index}".encode(), digest_size=8).digest()
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return np.random.default_rng(int.from_bytes(digest, "little")).random(shape, dtype=np.float32)


def tokens_of(layout: KvLayout, num_tokens: int, seed: int) -> np.ndarray:
    """`[num_tokens, num_layers, 2, num_kv_heads, head_dim]`."""
    return np.stack([token_bytes_of(layout, index, seed) for index in range(num_tokens)])


@dataclass(frozen=True, slots=True)
class HostPiece:
    """A `SourcePiece` and a `SinkPiece` of a slab in host memory: there is nothing to copy."""

    memory: memoryview

    @property
    def payload(self) -> memoryview:
        return self.memory

    def release(self) -> None:
        pass

    def place(self, on_placed: Callable[[], None]) -> None:
        on_placed()

    def discard(self) -> None:
        pass


@dataclass
class FakeSource:
    """A sequence's blocks on the prefill worker. Reading after `close` fails."""

    layout: KvLayout
    num_tokens: int
    seed: int = 0
    slabs: np.ndarray = field(init=False)
    is_closed: bool = False

    def __post_init__(self) -> None:
        layout = self.layout
        num_blocks = layout.blocks_for(self.num_tokens)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.slabs = np.full(shape, np.nan, dtype=np.float32)
        tokens = tokens_of(layout, self.num_tokens, self.seed)
        for index in range(self.num_tokens):
            self.slabs[index // layout.block_size, :, :, :, index % layout.block_size] = tokens[index]

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def piece_bytes(self) -> int:
        return self.layout.block_bytes

    def read(self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]) -> HostPiece:
        assert not self.is_closed, "read after on_end"
        slab = memoryview(self.slabs[block_index]).cast("B").toreadonly()
        return HostPiece(slab[slab_offset : slab_offset + size_bytes])

    def close(self) -> None:
        """The blocks are somebody else's now: whatever still looks at them sees garbage."""
        self.is_closed = True
        self.slabs.view(np.uint8)[...] = 0xEE


@dataclass
class FakeSink:
    """A sequence's blocks on the decode worker, with `skip_tokens` of its own that must not change."""

    layout: KvLayout
    num_tokens: int
    skip_tokens: int = 0
    is_direct: bool = True
    slabs: np.ndarray = field(init=False)
    num_absorbed: int = 0
    frozen: bytes | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        num_blocks = layout.blocks_for(self.num_tokens)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.slabs = np.full(shape, -1.0, dtype=np.float32)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def target(self, block_index: int, slab_offset: int, size_bytes: int) -> HostPiece | None:
        if not self.is_direct:
            return None
        return HostPiece(memoryview(self.slabs[block_index]).cast("B")[slab_offset : slab_offset + size_bytes])

    def absorb(
        self,
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_absorbed: Callable[[], None],
    ) -> None:
        layout = self.layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, source_block_size, layout.head_dim)
        slab = np.frombuffer(payload, dtype=np.float32).reshape(shape)
        assert first_token >= self.skip_tokens
        assert first_token // source_block_size == (first_token + num_tokens - 1) // source_block_size
        for token in range(first_token, first_token + num_tokens):
            self.slabs[token // layout.block_size, :, :, :, token % layout.block_size] = slab[
                :, :, :, token % source_block_size
            ]
        self.num_absorbed += num_tokens
        on_absorbed()

    def tokens(self) -> np.ndarray:
        """`[num_tokens, num_layers, 2, num_kv_heads, head_dim]`."""
        block_size = self.layout.block_size
        return np.stack(
            [self.slabs[index // block_size, :, :, :, index % block_size] for index in range(self.num_tokens)]
        )

    def freeze(self) -> None:
        """The blocks are somebody else's now: remember them."""
        self.frozen = self.slabs.tobytes()

    def is_untouched(self) -> bool:
        """Nobody wrote since `freeze`."""
        return self.slabs.tobytes() == self.frozen
