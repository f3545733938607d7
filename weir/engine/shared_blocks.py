"""Blocks that a worker of the same host copies out of this one's cache itself, or this one out of another's.

Only whether a block may be read is waited for here; that it stays what it is, is the transfer's to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weir.engine.block_staging import StagedBlocks
from weir.engine.memory_sharing import MappedMemory, MemorySharing
from weir.engine.paged_kv_cache import PagedKvCache


@dataclass(slots=True, eq=False)
class LocatedPiece:
    """A piece that is only named.

    Attributes:
        memory_offset: where it lies in the exported memory; None until it may be copied from there.
    """

    memory_offset: int | None = None

    @property
    def payload(self) -> None:
        """There is none here."""
        return None

    def release(self) -> None:
        """Nothing was taken for it."""


class SharedBlocks:
    """One engine's cache, for those who map it, and what this engine maps.

    Args:
        threads: runs the copies, and what else waits for the device.
    """

    def __init__(self, cache: PagedKvCache, sharing: MemorySharing, threads: StagedBlocks) -> None:
        self._cache = cache
        self._sharing = sharing
        self._threads = threads

    @property
    def domain(self) -> str:
        """See MemorySharing."""
        return self._sharing.domain

    def export(self) -> bytes:
        """A handle for one peer."""
        return self._sharing.export(self._cache)

    async def map(self, handle: bytes) -> MappedMemory:
        """Map a peer's cache, off the loop. Raises UnavailableError where that cannot be."""
        return await asyncio.to_thread(self._sharing.map, handle)

    def locate(
        self, block_id: int, offset: int, on_read: Callable[[], None], *, after: torch.cuda.Event | None
    ) -> LocatedPiece:
        """Name a piece of a block as soon as `after` is over.

        Args:
            on_read: called once, on the loop, if that is not so when this returns.
        """
        memory_offset = block_id * self._cache.layout.block_bytes + offset
        if after is None or after.query():
            return LocatedPiece(memory_offset)
        piece = LocatedPiece()

        def is_over(is_written: bool) -> None:
            if is_written:
                piece.memory_offset = memory_offset
            on_read()

        self._threads.start(after.synchronize, is_over)
        return piece

    def pull(
        self,
        block_id: int,
        offset: int,
        size_bytes: int,
        memory: MappedMemory,
        memory_offset: int,
        on_pulled: Callable[[], None],
        *,
        after: torch.cuda.Event | None,
    ) -> None:
        """Copy bytes of a peer's cache into a block; `on_pulled` hears on the loop that it is over."""

        def copy() -> None:
            source = memory.tensor[memory_offset : memory_offset + size_bytes]
            self._threads.copy([(source, self._cache.block_bytes(block_id)[offset : offset + size_bytes])], after)

        self._threads.start(copy, lambda is_copied: on_pulled())
