"""KV memory of two workers: slabs with known bytes, which notice being read or written when they must not be.

`Slow` ones are like memory on a device: every piece takes a while on its way to or from host memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kv_transfer.blocks import PeerMemory
from weir.core.kv_layout import KvLayout
from weir.engine.block_access import HostPiece


def token_bytes_of(layout: KvLayout, token_index: int, seed: int) -> np.ndarray:
    """What one token holds `[num_layers, 2, num_kv_heads, head_dim]`, as float32; the same on every worker."""
    digest = hashlib.blake2b(f"{seed}/{token_index}".encode(), digest_size=8).digest()
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return np.random.default_rng(int.from_bytes(digest, "little")).random(shape, dtype=np.float32)


def tokens_of(layout: KvLayout, num_tokens: int, seed: int) -> np.ndarray:
    """`[num_tokens, num_layers, 2, num_kv_heads, head_dim]`."""
    return np.stack([token_bytes_of(layout, index, seed) for index in range(num_tokens)])


@dataclass
class FakeMemory:
    """The memory of a prefill worker as a decode worker has mapped it: what is in it is looked up when it is copied."""

    regions: list[memoryview] = field(default_factory=list)
    is_lost: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.regions) << 32

    def view(self, offset: int, size_bytes: int) -> memoryview:
        start = offset & 0xFFFFFFFF
        return self.regions[offset >> 32][start : start + size_bytes]


@dataclass
class FakeSource:
    """A sequence's blocks on the prefill worker. Reading after `close` fails.

    Attributes:
        memory: where its pieces are named, if they are.
    """

    layout: KvLayout
    num_tokens: int
    seed: int = 0
    memory: FakeMemory = field(default_factory=FakeMemory)
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
        self.region = len(self.memory.regions)
        self.memory.regions.append(memoryview(self.slabs.view(np.uint8).reshape(-1)))

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

    def locate(self, block_index: int, slab_offset: int) -> int:
        assert not self.is_closed, "named after on_end"
        return (self.region << 32) + block_index * self.block_bytes + slab_offset

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
    num_pulled_bytes: int = 0
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

    def pull(
        self,
        block_index: int,
        slab_offset: int,
        size_bytes: int,
        memory: PeerMemory,
        memory_offset: int,
        on_pulled: Callable[[bool], None],
    ) -> None:
        assert isinstance(memory, FakeMemory)
        if not memory.is_lost:
            slab = memoryview(self.slabs[block_index]).cast("B")
            slab[slab_offset : slab_offset + size_bytes] = memory.view(memory_offset, size_bytes)
            self.num_pulled_bytes += size_bytes
        on_pulled(not memory.is_lost)

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


class SlowRead:
    """A piece that is copied to host memory a while after it was asked for."""

    def __init__(self, source: SlowSource, slab: memoryview, on_read: Callable[[], None]) -> None:
        self.payload: memoryview | None = None
        self._source = source
        self._slab = slab
        self._on_read = on_read
        self._is_released = False
        source.num_reading += 1
        asyncio.get_running_loop().call_later(source.delay_s(), self._read)

    def release(self) -> None:
        assert not self._is_released, "released twice"
        self._is_released = True
        self.payload = None
        self._source.num_unreleased -= 1

    def _read(self) -> None:
        assert not self._source.is_closed, "read after on_end"
        self._source.num_reading -= 1
        if not self._is_released:
            self.payload = memoryview(bytes(self._slab))
        self._on_read()


@dataclass
class SlowSource(FakeSource):
    """Blocks of a prefill worker on a device; `delay_s` is drawn for every piece."""

    delay_s: Callable[[], float] = lambda: 0.001
    num_reading: int = 0
    num_unreleased: int = 0

    def read(  # type: ignore[override]
        self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]
    ) -> SlowRead:
        self.num_unreleased += 1
        return SlowRead(self, super().read(block_index, slab_offset, size_bytes, on_read).memory, on_read)

    def close(self) -> None:
        assert self.num_reading == 0, "ended while blocks are read"
        assert self.num_unreleased == 0, "ended with pieces that nobody released"
        super().close()


class LateWrite:
    """A piece that is copied to its block after it was placed, when its sink does that."""

    def __init__(self, sink: LateSink, slab: memoryview) -> None:
        self.memory = memoryview(bytearray(slab.nbytes))
        self._sink = sink
        self._slab = slab
        sink.num_open += 1

    def place(self, on_placed: Callable[[], None]) -> None:
        def write() -> None:
            self._slab[:] = self.memory
            self._sink.num_open -= 1
            on_placed()

        self._sink.defer(write)

    def discard(self) -> None:
        self._sink.num_open -= 1
        self._sink.num_discarded += 1


@dataclass
class LateSink(FakeSink):
    """Blocks of a decode worker on a device: everything is placed after it came."""

    num_open: int = 0
    num_discarded: int = 0

    def defer(self, write: Callable[[], None]) -> None:
        """Do it later."""
        raise NotImplementedError

    def target(  # type: ignore[override]
        self, block_index: int, slab_offset: int, size_bytes: int
    ) -> LateWrite | None:
        piece = super().target(block_index, slab_offset, size_bytes)
        return None if piece is None else LateWrite(self, piece.memory)

    def pull(
        self,
        block_index: int,
        slab_offset: int,
        size_bytes: int,
        memory: PeerMemory,
        memory_offset: int,
        on_pulled: Callable[[bool], None],
    ) -> None:
        self._open(partial(super().pull, block_index, slab_offset, size_bytes, memory, memory_offset, on_pulled))

    def absorb(
        self,
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_absorbed: Callable[[], None],
    ) -> None:
        self._open(partial(super().absorb, first_token, num_tokens, payload, source_block_size, on_absorbed))

    def _open(self, write: Callable[[], None]) -> None:
        def close() -> None:
            self.num_open -= 1
            write()

        self.num_open += 1
        self.defer(close)


@dataclass
class SlowSink(LateSink):
    """`delay_s` is drawn for every piece."""

    delay_s: Callable[[], float] = lambda: 0.001

    def defer(self, write: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.delay_s(), write)

    def freeze(self) -> None:
        assert self.num_open == 0, "ended while blocks are written"
        super().freeze()
