"""Blocks on a device, read and written through pinned host memory: see `weir.engine.block_access.BlockAccess`.

The copies run in a few threads of their own, so that neither the loop nor a step of the engine ever waits for one; all
else happens on the loop. The pinned memory is bounded: reads wait in line for a slot, in the order in which they came.
What is received never waits, since a connection that did would hold up others; without a slot it lands in ordinary
memory, which its sender's credit bounds, and the copy takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import torch

from weir.core.errors import UnavailableError
from weir.engine.block_copies import BlockCopies
from weir.engine.paged_kv_cache import PagedKvCache

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 512 << 10
"""Size of a slot: the payload of one frame."""

NUM_THREADS = 4
"""More than one, so that blocks that are written already are copied beside some whose step still runs."""


class StagedRead:
    """See `BlockRead`; made by `StagedBlocks.read`.

    Attributes:
        slot: where it is copied to; None while it waits in line.
    """

    def __init__(
        self, blocks: StagedBlocks, size_bytes: int, copy: Callable[[torch.Tensor], None], on_read: Callable[[], None]
    ) -> None:
        self.size_bytes = size_bytes
        self.copy = copy
        self.on_read = on_read
        self.slot: int | None = None
        self.payload: memoryview | None = None
        self.is_released = False
        self._blocks = blocks

    def release(self) -> None:
        """See BlockRead."""
        assert not self.is_released, "released twice"
        self.is_released = True
        self._blocks.read_released(self)


class StagedWrite:
    """See `BlockWrite`; made by `StagedBlocks.write`."""

    def __init__(self, blocks: StagedBlocks, memory: memoryview, slot: int | None, copy: Callable[[], None]) -> None:
        self.memory = memory
        self._slot = slot
        self._copy = copy
        self._blocks = blocks

    def place(self, on_placed: Callable[[], None]) -> None:
        """See BlockWrite."""

        def copied(is_copied: bool) -> None:
            self._blocks.give_back(self._slot)
            on_placed()

        self._blocks.start(self._copy, copied)

    def discard(self) -> None:
        """See BlockWrite."""
        self._blocks.give_back(self._slot)


class StagedBlocks:
    """A `BlockAccess`, and an async context manager, to be left when nobody reads or writes any more.

    Args:
        copies: starts the copies; used in the threads.
        size_bytes: of the pinned memory; one piece at least.
        on_failure: told, on the loop, of a copy that failed, before whoever waits for it hears that it is over. Nobody
            may go on with these blocks.
    """

    def __init__(
        self, cache: PagedKvCache, copies: BlockCopies, *, size_bytes: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._cache = cache
        self._copies = copies
        self._on_failure = on_failure
        self.piece_bytes = min(cache.layout.block_bytes, MAX_PIECE_BYTES)
        self.num_slots = max(1, size_bytes // self.piece_bytes)
        self._free = list(range(self.num_slots))
        self._line: deque[StagedRead] = deque()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="block-copy")
        self._slots = await asyncio.to_thread(
            torch.empty,
            (self.num_slots, self.piece_bytes),
            dtype=torch.uint8,
            pin_memory=self._cache.tensor.is_cuda,
        )
        self._memory = self._slots.view(-1).numpy().data
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def read(
        self,
        block_id: int,
        offset: int,
        size_bytes: int,
        on_read: Callable[[], None],
    ) -> StagedRead:
        """See BlockAccess."""
        assert size_bytes <= self.piece_bytes, f"{size_bytes} bytes do not fit a slot of {self.piece_bytes}"

        def copy(slot: torch.Tensor) -> None:
            source = self._cache.block_bytes(block_id)[offset : offset + size_bytes]
            self.copy([(source, slot[:size_bytes])])

        read = StagedRead(self, size_bytes, copy, on_read)
        self._line.append(read)
        self._start_reads()
        return read

    def write(self, block_id: int, offset: int, size_bytes: int) -> StagedWrite:
        """See BlockAccess."""
        has_slot = self._free and size_bytes <= self.piece_bytes
        slot = self._free.pop() if has_slot else None
        memory = memoryview(bytearray(size_bytes)) if slot is None else self._view(slot, size_bytes)

        def copy() -> None:
            source = torch.frombuffer(memory, dtype=torch.uint8)
            self.copy([(source, self._cache.block_bytes(block_id)[offset : offset + size_bytes])])

        return StagedWrite(self, memory, slot, copy)

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

        def copy() -> None:
            self.copy(self._cache.token_copies(block_ids, first_token, num_tokens, payload, source_block_size))

        self.start(copy, lambda is_copied: on_written())

    # For the pieces, and for `weir.engine.shared_blocks`

    def start(self, copy: Callable[[], None], on_end: Callable[[bool], None]) -> None:
        """Run a copy in a thread; `on_end` hears on the loop that it is over, and whether it did what it should."""
        self.follow(self.submit(copy), on_end)

    def submit(self, copy: Callable[[], None]) -> Future[None]:
        """Run a copy in a thread."""
        return self._executor.submit(copy)

    def follow(self, over: Future[None], on_end: Callable[[bool], None]) -> None:
        """As `start` does, for a copy that runs already."""
        over.add_done_callback(partial(self._leave_thread, on_end))

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In a thread, which waits for the end."""
        self._copies.start(pairs).wait()

    def read_released(self, read: StagedRead) -> None:
        """Nobody wants a read any more, wherever it stands."""
        if read.slot is None:
            self._line.remove(read)
            read.on_read()
        elif read.payload is not None:
            read.payload = None
            self.give_back(read.slot)

    def give_back(self, slot: int | None) -> None:
        """Nobody looks at a slot any more; the first read in line gets it."""
        if slot is not None:
            self._free.append(slot)
            self._start_reads()

    def _start_reads(self) -> None:
        while self._line and self._free:
            read = self._line.popleft()
            read.slot = self._free.pop()
            self.start(partial(read.copy, self._slots[read.slot]), partial(self._read_ended, read, read.slot))

    def _read_ended(self, read: StagedRead, slot: int, is_copied: bool) -> None:
        if is_copied and not read.is_released:
            read.payload = self._view(slot, read.size_bytes).toreadonly()
        else:
            self.give_back(slot)
        read.on_read()

    def _view(self, slot: int, size_bytes: int) -> memoryview:
        start = slot * self.piece_bytes
        return self._memory[start : start + size_bytes]

    def _leave_thread(self, on_end: Callable[[bool], None], future: Future[None]) -> None:
        if not future.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._ended, on_end, future.exception())

    def _ended(self, on_end: Callable[[bool], None], error: BaseException | None) -> None:
        if isinstance(error, UnavailableError):
            logger.warning("%s", error.message)  # a peer's memory: this device goes on
        elif error is not None:
            logger.critical("a copy of blocks has failed", exc_info=error)
            self._on_failure(error)
        on_end(error is None)
