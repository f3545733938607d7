"""What the two ends of a hand-off ask of whoever owns the KV memory: a source to read, a sink to fill.

Block indices count in the sequence, never in a pool. A slab is one block's memory, all layers, contiguous
(`weir.core.kv_layout`); its tokens are those from `block_index * block_size` on. A piece is a range of one slab's
bytes. Blocks may lie where this process cannot look (on a device): then a piece goes through host memory, which takes
a while, and a callback on the loop says when that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class SourcePiece(Protocol):
    """One piece of a source's slab in host memory, or on its way there; whoever asked for it releases it once."""

    @property
    def payload(self) -> memoryview | None:
        """Its bytes, readable until `release`; None until they are there."""
        ...

    def release(self) -> None:
        """Nobody reads the payload any more, or wants it."""
        ...


class BlockSource(Protocol):
    """The blocks of one sequence on the prefill worker, unchanged from the moment they are offered until `on_end`."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab."""
        ...

    @property
    def piece_bytes(self) -> int:
        """Most bytes of one `read`."""
        ...

    def read(self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]) -> SourcePiece:
        """A piece of a block that is ready.

        Args:
            on_read: called once if the payload is not there when this returns, and only after that, maybe by
                `release`: nothing reads the block for this piece any more, and the payload is there if it is wanted.
        """
        ...

    def locate(self, block_index: int, slab_offset: int) -> int:
        """Where a piece of a block that is ready lies in the source's memory, for a sink that reads it there."""
        ...


class PeerMemory(Protocol):
    """KV memory of a source that this process can read; only a sink can do more with it."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """It could be read, and cannot any more."""
        ...


class SinkPiece(Protocol):
    """Where one piece lands; ends with `place` or `discard`."""

    @property
    def memory(self) -> memoryview:
        """Writable, of the piece's size."""
        ...

    def place(self, on_placed: Callable[[], None]) -> None:
        """The bytes are right: bring them into the block.

        Args:
            on_placed: called once, maybe at once: they are there, and nothing writes the block for this piece any more.
        """
        ...

    def discard(self) -> None:
        """The bytes are wrong, or nobody wants them any more."""
        ...


class BlockSink(Protocol):
    """Where one sequence's blocks go on the decode worker."""

    @property
    def block_size(self) -> int:
        """Tokens a block; may differ from the source's."""
        ...

    def target(self, block_index: int, slab_offset: int, size_bytes: int) -> SinkPiece | None:
        """Where that piece goes, or None, which is so for the whole block, to get it through `absorb`.

        Only asked when both block sizes are equal.
        """
        ...

    def pull(
        self,
        block_index: int,
        slab_offset: int,
        size_bytes: int,
        memory: PeerMemory,
        memory_offset: int,
        on_pulled: Callable[[bool], None],
    ) -> None:
        """Copy a piece out of the source's memory, whose size was checked. Only asked when both block sizes are equal.

        Args:
            on_pulled: called once, maybe at once, with whether the piece is there; nothing writes any more for it.
        """
        ...

    def absorb(
        self,
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_absorbed: Callable[[], None],
    ) -> None:
        """Copy tokens `[first_token, first_token + num_tokens)` of the sequence out of one whole, verified source slab.

        The slab holds the tokens from `first_token - first_token % source_block_size` on; those outside of the given
        range are either already here or not valid. May be asked twice for the same tokens, with the same bytes.

        Args:
            payload: writable, and the sink's own from now on.
            on_absorbed: called once, maybe at once: they are there, and nothing writes any more for this call.
        """
        ...
