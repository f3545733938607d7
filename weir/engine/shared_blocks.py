"""Blocks that another worker copies out of this one's cache itself, or this one out of another's.

That a block stays what it is while it is read, is the transfer's to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weir.engine.block_staging import StagedBlocks
from weir.engine.memory_sharing import MemorySharing, PeerMemory
from weir.engine.paged_kv_cache import PagedKvCache


class SharedBlocks:
    """One engine's cache, for those who read it, and what this engine reads.

    Args:
        copies: tells the loop of copies that are over.
    """

    def __init__(self, cache: PagedKvCache, sharing: MemorySharing, copies: StagedBlocks) -> None:
        self._cache = cache
        self._sharing = sharing
        self._copies = copies

    @property
    def domain(self) -> str:
        """See MemorySharing."""
        return self._sharing.domain

    def export(self) -> bytes:
        """A handle for one peer."""
        return self._sharing.export()

    async def map(self, handle: bytes) -> PeerMemory:
        """A peer's cache, found off the loop. Raises UnavailableError where that cannot be."""
        return await asyncio.to_thread(self._sharing.map, handle)

    def locate(self, block_id: int, offset: int) -> int:
        """Where a block's bytes from `offset` on lie in the exported memory."""
        return block_id * self._cache.layout.block_bytes + offset

    def pull(
        self,
        block_id: int,
        offset: int,
        size_bytes: int,
        memory: PeerMemory,
        memory_offset: int,
        on_pulled: Callable[[bool], None],
    ) -> None:
        """Copy bytes of a peer's cache into a block; `on_pulled` hears on the loop that it is over, and if it did."""
        destination = self._cache.block_bytes(block_id)[offset : offset + size_bytes]
        self._copies.follow(memory.read(memory_offset, destination), on_pulled)
