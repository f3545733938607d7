"""Owns the KV blocks by number: who may use which, what the full ones hold, and which goes next.

Every operation costs the same in a pool of ten blocks and of a million. It knows nothing of sequences or tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from weir.core.block_hash import BlockHash
from weir.engine.cold_blocks import ColdBlocks
from weir.engine.kv_events import KvEventLog, KvEvents

NOT_FREE = -1


class BlockPool:
    """Reference counts, a free list in exact order and the map from content to block.

    The free list is doubly linked inside two arrays: its head goes next, its tail last. A block that nobody references
    is in it, hash kept, until it is allocated again: that is the prefix cache. Released blocks with a hash join the
    tail, a chain's last block before its first, so that long prefixes lose their ends first. A released block without
    a hash holds nothing that anyone could find again and goes to the head.

    Args:
        num_blocks: blocks are numbered 0 to `num_blocks - 1`; at the start all are free, in that order.
        cold: takes what allocated blocks held. To the reader of events it is the same whether content is here or there.
    """

    def __init__(self, num_blocks: int, cold: ColdBlocks | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # Index num_blocks is the ring's anchor: its successor is the head, its predecessor the tail.
        self._next = array("i", range(1, num_blocks + 2))
        self._previous = array("i", range(-1, num_blocks))
        self._next[num_blocks], self._previous[0] = 0, num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._events = KvEventLog(capacity=num_blocks)
        self._is_worth_saving = bytearray(num_blocks)
        self._cold = cold
        if cold is not None:
            cold.on_drop = self._note_dropped

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def has_events(self) -> bool:
        return self._events.has_news

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds this content, referenced or free; changes nothing."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._hash_of.get(block_id)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the free list, one reference each; what they held is forgotten here.

        The caller has made sure that `num_free` covers it.
        """
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} blocks asked of {self.num_free} free"
        taken: list[int] = []
        for _ in range(num_blocks):
            block_id = self._next[self.num_blocks]
            self._unlink(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        if self._cold is not None:
            self._save(taken, self._cold)
        for block_id in taken:
            self._forget(block_id)
        return taken

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; a free one leaves the free list with its content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference of each block of a chain, given in the chain's order."""
        if self._cold is not None and self._cold.is_worth_loading(len(block_ids)):
            for block_id in block_ids:
                self._is_worth_saving[block_id] = True
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than referenced"
            self._ref_counts[block_id] = count
            if count == 0:
                tail = self._previous[self.num_blocks]
                self._link(block_id, after=tail if block_id in self._hash_of else self.num_blocks)

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Say what a full, referenced block holds.

        Content that another block already holds keeps its first block: the second stays private to its sequence.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} published while free"
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            if self._cold is None or block_hash not in self._cold:
                self._events.record_stored(block_hash)

    def forget_all(self) -> bool:
        """Empty the prefix cache; False, and nothing changed, while any block is referenced."""
        if self.num_referenced:
            return False
        self._block_of.clear()
        self._hash_of.clear()
        if self._cold is not None:
            self._cold.forget_all()
        self._events.restart()
        return True

    def content(self) -> tuple[BlockHash, ...]:
        """Hashes of every block that holds any, referenced or free, and of cold ones."""
        return tuple(self._all_content())

    def take_events(self) -> KvEvents:
        return self._events.take(self._all_content())

    def restart_events(self) -> None:
        """The reader lost what it took; its next events start from the whole content."""
        self._events.restart()

    def free_block_ids(self) -> Iterator[int]:
        """The free list from the head (next to go) to the tail."""
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            yield block_id
            block_id = self._next[block_id]

    def check_integrity(self) -> None:
        """Costs a walk of the whole pool.

        Raises:
            AssertionError: says which law is broken.
        """
        seen = bytearray(self.num_blocks)
        last = self.num_blocks
        for block_id in self.free_block_ids():
            assert not seen[block_id], f"block {block_id} is twice in the free list"
            assert self._previous[block_id] == last, f"block {block_id} has a wrong predecessor in the free list"
            assert self._ref_counts[block_id] == 0, f"block {block_id} is free and referenced"
            seen[block_id] = 1
            last = block_id
        assert self._previous[self.num_blocks] == last, "the free list's tail is wrong"
        num_free = seen.count(1)
        assert num_free == self.num_free, f"{num_free} blocks in the free list, {self.num_free} counted"
        num_referenced = self.num_blocks - self._ref_counts.count(0)
        assert num_free + num_referenced == self.num_blocks, (
            f"{num_free} free + {num_referenced} referenced is not {self.num_blocks}: blocks leaked"
        )
        assert {block_id: name for name, block_id in self._block_of.items()} == self._hash_of, (
            "hash -> block and block -> hash disagree"
        )
        assert len(self._block_of) == len(self._hash_of), "two hashes name one block"

    def _link(self, block_id: int, *, after: int) -> None:
        following = self._next[after]
        self._next[after] = self._previous[following] = block_id
        self._next[block_id], self._previous[block_id] = following, after
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, following = self._previous[block_id], self._next[block_id]
        assert following != NOT_FREE, f"block {block_id} is not in the free list"
        self._next[before], self._previous[following] = following, before
        self._next[block_id] = self._previous[block_id] = NOT_FREE
        self.num_free -= 1

    def _forget(self, block_id: int) -> None:
        self._is_worth_saving[block_id] = False
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self._cold is None or block_hash not in self._cold:
                self._events.record_removed(block_hash)

    def _all_content(self) -> Iterator[BlockHash]:
        yield from self._block_of
        if self._cold is not None:
            yield from (block_hash for block_hash in self._cold.content() if block_hash not in self._block_of)

    def _save(self, block_ids: Sequence[int], cold: ColdBlocks) -> None:
        """Before anybody overwrites them."""
        cold.save(
            [
                (block_id, self._hash_of[block_id])
                for block_id in block_ids
                if self._is_worth_saving[block_id] and block_id in self._hash_of
            ]
        )

    def _note_dropped(self, block_hash: BlockHash) -> None:
        if block_hash not in self._block_of:
            self._events.record_removed(block_hash)
