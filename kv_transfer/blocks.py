"""What the two ends of a hand-off ask of whoever owns the KV memory: a source to read, a sink to fill.

Block indices count in the sequence, never in a pool. A slab is one block's memory, all layers, contiguous
(`weir.core.kv_layout`); its tokens are those from `block_index * block_size` on.
"""

from __future__ import annotations

from typing import Protocol


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

    def view(self, block_index: int) -> memoryview:
        """The slab `[block_bytes]` of the block at that index, as bytes; only asked for blocks that are ready."""
        ...


class BlockSink(Protocol):
    """Where one sequence's blocks go on the decode worker."""

    @property
    def block_size(self) -> int:
        """Tokens a block; may differ from the source's."""
        ...

    def target(self, block_index: int) -> memoryview | None:
        """The writable slab `[block_bytes]` to receive that block into, or None to get it through `absorb`.

        Only asked when both block sizes are equal; written until the fetch has ended.
        """
        ...

    def absorb(self, first_token: int, num_tokens: int, payload: memoryview, source_block_size: int) -> None:
        """Copy tokens `[first_token, first_token + num_tokens)` of the sequence out of one whole, verified source slab.

        The slab holds the tokens from `first_token - first_token % source_block_size` on; those outside of the given
        range are either already here or not valid. `payload` is only readable during the call. May be asked twice for
        the same tokens, with the same bytes.
        """
        ...
