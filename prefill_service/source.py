"""The blocks of one prompt as the KV transfer reads them: those of the engine's own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.engine.async_engine import AsyncEngine, PrefillProgress
    from weir.engine.block_access import BlockRead


class EngineBlockSource:
    """A `kv_transfer.blocks.BlockSource` over the engine's memory; its table grows while the prompt is computed.

    Blocks stay as they are for as long as a hold keeps them.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._blocks = engine.blocks
        self._shared = engine.shared
        self._block_ids: tuple[int, ...] = ()
        self.block_size = engine.layout.block_size
        self.block_bytes = engine.layout.block_bytes
        self.piece_bytes = engine.blocks.piece_bytes

    def extend(self, progress: PrefillProgress) -> None:
        """The prompt is computed so far; its block table is only ever longer than before."""
        assert progress.block_ids[: len(self._block_ids)] == self._block_ids, "a held block table changed"
        self._block_ids = progress.block_ids

    def read(self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]) -> BlockRead:
        """A piece of the prompt's block at `block_index`."""
        return self._blocks.read(self._block_ids[block_index], slab_offset, size_bytes, on_read)

    def locate(self, block_index: int, slab_offset: int) -> int:
        """Where such a piece lies in the engine's memory."""
        assert self._shared is not None, "memory that was never exported"
        return self._shared.locate(self._block_ids[block_index], slab_offset)
