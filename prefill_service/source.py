"""The blocks of one prompt as the KV transfer reads them: slabs of the engine's own cache, no copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.engine.async_engine import AsyncEngine


class EngineBlockSource:
    """A `kv_transfer.blocks.BlockSource` over the engine's memory; its table grows while the prompt is computed.

    Views stay valid for as long as a hold keeps the blocks.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._block_ids: tuple[int, ...] = ()
        self.block_size = engine.layout.block_size
        self.block_bytes = engine.layout.block_bytes

    def set_block_ids(self, block_ids: tuple[int, ...]) -> None:
        """The prompt's block table; only ever longer than before."""
        assert block_ids[: len(self._block_ids)] == self._block_ids, "a held block table changed"
        self._block_ids = block_ids

    def view(self, block_index: int) -> memoryview:
        """Read-only `[block_bytes]` of the prompt's block at `block_index`."""
        return self._engine.block_view(self._block_ids[block_index]).toreadonly()
