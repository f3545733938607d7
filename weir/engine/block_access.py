"""How others on the loop read and write the blocks of an engine: a piece of bytes at a time, and nobody waits.

`InPlaceBlocks` is this for a cache that is host memory already; `weir.engine.block_staging` for one that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weir.engine.paged_kv_cache import PagedKvCache


class BlockRead(Protocol):
    """A piece of a block in host memory, or on its way there."""

    @property
    def payload(self) -> memoryview | None:
        """Readable until `release`; None until it is there."""
        ...

    def release(self) -> None:
        """Nobody reads the payload any more, or wants it; called once."""
        ...


class BlockWrite(Protocol):
    """A piece of a block that is being received; ends with `place` or `discard`."""

    @property
    def memory(self) -> memoryview:
        """Where to put the bytes."""
        ...

    def place(self, on_placed: Callable[[], None]) -> None:
        """Bring the bytes into the block; `on_placed` is called once, maybe at once: nothing is written any more."""
        ...

    def discard(self) -> None:
        """Leave the block as it is, or with these bytes."""
        ...


class BlockAccess(Protocol):
    """The blocks of one engine. Whoever reads or writes one holds it until the callback has come."""

    @property
    def piece_bytes(self) -> int:
        """Most bytes of one `read`."""
        ...

    def read(
        self,
        block_id: int,
        offset: int,
        size_bytes: int,
        on_read: Callable[[], None],
    ) -> BlockRead:
        """Bytes of a block.

        Args:
            on_read: called once, on the loop, if the payload is not there when this returns, and only after that, maybe
                by `release`: nothing reads the block any more.
        """
        ...

    def write(self, block_id: int, offset: int, size_bytes: int) -> BlockWrite:
        """Receive bytes of a block."""
        ...

    def write_tokens(
        self,
        block_ids: tuple[int, ...],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_written: Callable[[], None],
    ) -> None:
        """Write tokens out of one block of a worker with any block size; see `PagedKvCache.write_tokens`.

        Args:
            payload: writable, and not the caller's any more.
            on_written: called once, on the loop, maybe at once, when nothing is written any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostPiece:
    """A piece that is a part of the block itself."""

    memory: memoryview

    @property
    def payload(self) -> memoryview:
        return self.memory

    def release(self) -> None:
        """See BlockRead."""

    def place(self, on_placed: Callable[[], None]) -> None:
        """See BlockWrite."""
        on_placed()

    def discard(self) -> None:
        """See BlockWrite."""


class InPlaceBlocks:
    """A cache in host memory: nothing is copied."""

    def __init__(self, cache: PagedKvCache) -> None:
        self._cache = cache
        self.piece_bytes = cache.layout.block_bytes

    def read(
        self,
        block_id: int,
        offset: int,
        size_bytes: int,
        on_read: Callable[[], None],
    ) -> HostPiece:
        """See BlockAccess."""
        return HostPiece(self._cache.block_view(block_id)[offset : offset + size_bytes].toreadonly())

    def write(self, block_id: int, offset: int, size_bytes: int) -> HostPiece:
        """See BlockAccess."""
        return HostPiece(self._cache.block_view(block_id)[offset : offset + size_bytes])

    def write_tokens(
        self,
        block_ids: tuple[int, ...],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_written: Callable[[], None],
    ) -> None:
        """See BlockAccess."""
        self._cache.write_tokens(block_ids, first_token, num_tokens, payload, source_block_size)
        on_written()
