"""The blocks of one prompt as the KV transfer reads them: those of the engine's own cache."""

from __future__ import annotations

from bisect import bisect_left
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
        self._progress: list[PrefillProgress] = []
        self.block_size = engine.layout.block_size
        self.block_bytes = engine.layout.block_bytes
        self.piece_bytes = engine.blocks.piece_bytes

    def extend(self, progress: PrefillProgress) -> None:
        """The prompt is computed so far; its block table is only ever longer than before."""
        assert progress.block_ids[: len(self._block_ids)] == self._block_ids, "a held block table changed"
        self._block_ids = progress.block_ids
        self._progress.append(progress)

    def read(self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]) -> BlockRead:
        """A piece of the prompt's block at `block_index`, as soon as the step that wrote its last token is over."""
        after = self._step_of(block_index).written
        return self._blocks.read(self._block_ids[block_index], slab_offset, size_bytes, on_read, after=after)

    def locate(self, block_index: int, slab_offset: int, on_read: Callable[[], None]) -> BlockRead:
        """Name such a piece to a worker that has mapped the engine's memory."""
        assert self._shared is not None, "memory that was never exported"
        after = self._step_of(block_index).written
        return self._shared.locate(self._block_ids[block_index], slab_offset, on_read, after=after)

    def _step_of(self, block_index: int) -> PrefillProgress:
        """The first progress with the whole block in it."""
        end = min((block_index + 1) * self.block_size, self._progress[-1].num_computed_tokens)
        step = bisect_left(self._progress, end, key=lambda progress: progress.num_computed_tokens)
        return self._progress[step]
