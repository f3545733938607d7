"""Where the KV of one hand-off goes: the engine's own cache, straight where block sizes agree, by token where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from weir.core.errors import TransferProtocolError

if TYPE_CHECKING:
    from kv_transfer import blocks
    from weir.engine.async_engine import AsyncEngine
    from weir.engine.block_access import BlockWrite
    from weir.engine.claim import ImportTarget
    from weir.engine.memory_sharing import PeerMemory


class EngineBlockSink:
    """A `kv_transfer.blocks.BlockSink` over the destination blocks of one sequence.

    Cached tokens lie in blocks that other sequences read too: what arrives for them is dropped.
    """

    def __init__(self, engine: AsyncEngine, target: ImportTarget) -> None:
        self._blocks = engine.blocks
        self._shared = engine.shared
        self._block_ids = target.block_ids
        self._num_cached_tokens = target.num_cached_tokens
        self.block_size = engine.layout.block_size

    def target(self, block_index: int, slab_offset: int, size_bytes: int) -> BlockWrite | None:
        """A piece of that block, None for a shared one. Raises TransferProtocolError beyond the table."""
        self._check(block_index)
        if block_index * self.block_size < self._num_cached_tokens:
            return None
        return self._blocks.write(self._block_ids[block_index], slab_offset, size_bytes)

    def pull(
        self,
        block_index: int,
        slab_offset: int,
        size_bytes: int,
        memory: blocks.PeerMemory,
        memory_offset: int,
        on_pulled: Callable[[bool], None],
    ) -> None:
        """Copy a piece of that block from the source's memory; not into a shared one. Raises as `target` does."""
        self._check(block_index)
        if block_index * self.block_size < self._num_cached_tokens:
            on_pulled(True)
            return
        assert self._shared is not None, "memory that was never mapped"
        self._shared.pull(
            self._block_ids[block_index],
            slab_offset,
            size_bytes,
            cast("PeerMemory", memory),  # made by `SharedBlocks.map`
            memory_offset,
            on_pulled,
        )

    def absorb(
        self,
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_absorbed: Callable[[], None],
    ) -> None:
        """Copy tokens out of one slab of the source into the blocks that hold them here. Raises as `target` does."""
        end = first_token + num_tokens
        self._check((end - 1) // self.block_size)
        first_token = max(first_token, self._num_cached_tokens)
        if first_token >= end:
            on_absorbed()
            return
        self._blocks.write_tokens(
            self._block_ids,
            first_token,
            end - first_token,
            payload,
            source_block_size,
            on_absorbed,
        )

    def _check(self, block_index: int) -> None:
        if block_index >= len(self._block_ids):
            raise TransferProtocolError(
                f"block {block_index} is beyond the {len(self._block_ids)} of this hand-off", hop="transfer"
            )
