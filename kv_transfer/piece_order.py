"""The pieces of one fetch as their sink counts them: which comes next, which must come again. Knows no memory.

Pieces come block by block, offset by offset, without a gap; only those that were wrong come once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64

from protos.kv_transfer_pb2 import Blocks
from protos.kv_transfer_pb2 import Seal as SealFrame
from weir.core.errors import TransferProtocolError
from weir.core.request import HandoffKey


@dataclass(frozen=True, slots=True)
class _WrongPiece:
    """A piece that must come again, with the size and the checksum its first header named."""

    size_bytes: int
    checksum: int


class PieceOrder:
    """Counts the pieces of one fetch.

    Args:
        first_block: index of the block that comes first.
        block_size, token_bytes: of the source's blocks.
    """

    def __init__(self, key: HandoffKey, *, first_block: int, block_size: int, token_bytes: int) -> None:
        self.first_block = first_block
        self._key = key
        self._block_size = block_size
        self._block_bytes = block_size * token_bytes
        self._sequence_number = 0
        self._next_block = first_block
        self._next_offset = 0
        self._wrong: dict[tuple[int, int], _WrongPiece] = {}  # by block index and slab offset
        self._digest = xxh3_64()
        self._is_sealed = False

    @property
    def num_right_blocks(self) -> int:
        """Leading blocks of the sequence that have come whole and right, those before the first counted in."""
        return min((block_index for block_index, _ in self._wrong), default=self._next_block)

    def is_right(self, block_index: int) -> bool:
        """That block has come whole, and nothing of it must come again."""
        return block_index < self._next_block and not any(wrong == block_index for wrong, _ in self._wrong)

    def begin(self, blocks: Blocks, size_bytes: int) -> None:
        """The header of a piece has come. Raises TransferProtocolError if it is not one that may come now."""
        if blocks.sequence_number != self._sequence_number:
            raise self._violation(f"frame {blocks.sequence_number} instead of {self._sequence_number}")
        self._sequence_number += 1
        block_index, offset = blocks.block_index, blocks.slab_offset
        if wrong := self._wrong.get((block_index, offset)):
            if (size_bytes, blocks.checksum) != (wrong.size_bytes, wrong.checksum):
                raise self._violation(f"block {block_index} at {offset} came again as another")
        elif (block_index, offset) != (self._next_block, self._next_offset) or self._is_sealed:
            raise self._violation(
                f"block {block_index} at {offset} instead of {self._next_block} at {self._next_offset}"
            )
        if offset + size_bytes > self._block_bytes or not 0 < blocks.num_tokens <= self._block_size:
            raise self._violation(f"{blocks.num_tokens} tokens, {size_bytes} bytes at {offset} in {self._block_bytes}")

    def end(self, blocks: Blocks, size_bytes: int, *, is_right: bool = True) -> bool:
        """All of the piece that began last has come. True if it came for the first time."""
        piece = (blocks.block_index, blocks.slab_offset)
        is_first = self._wrong.pop(piece, None) is None
        if is_first:
            if blocks.HasField("checksum"):
                self._digest.update(blocks.checksum.to_bytes(8, "little"))
            self._next_offset += size_bytes
            if self._next_offset == self._block_bytes:
                self._next_block, self._next_offset = self._next_block + 1, 0
        if not is_right:
            self._wrong[piece] = _WrongPiece(size_bytes, blocks.checksum)
        return is_first

    def seal(self, message: SealFrame) -> None:
        """Nothing comes any more but what was wrong. Raises TransferProtocolError if it does not fit what came."""
        num_blocks = -(-message.num_tokens // self._block_size)
        if (
            self._is_sealed
            or self._next_offset
            or (message.first_block, message.num_blocks) != (self.first_block, self._next_block)
            or message.num_blocks != num_blocks
            or message.digest != self._digest.intdigest()
        ):
            raise self._violation("the seal does not fit the blocks that came")
        self._is_sealed = True

    def _violation(self, what: str) -> TransferProtocolError:
        return TransferProtocolError(f"{self._key}: {what}", hop="transfer")
