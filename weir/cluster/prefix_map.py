"""Which workers have a block, by hash: the data structure of the prefix index. Knows neither Redis nor time.

A set of workers is the bits of one integer, so that the cost of a match depends on the blocks that are looked up and on
the workers that have the first of them, hardly on how many workers there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from weir.core.block_hash import BlockHash
from weir.core.worker import WorkerId


class PrefixMap:
    """Holds at most `max_entries` pairs of worker and block; further ones are counted and not kept."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._holders: dict[BlockHash, int] = {}
        self._slots: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []
        self._blocks: list[set[BlockHash]] = []
        self._free_slots: list[int] = []
        self._retired: deque[int] = deque()
        self._live = 0
        self.num_entries = 0
        self.num_untracked = 0

    @property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(self._slots)

    def num_blocks(self, worker_id: WorkerId) -> int:
        slot = self._slots.get(worker_id)
        return 0 if slot is None else len(self._blocks[slot])

    def add(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker has these blocks now."""
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = self._assign_slot(worker_id)
        blocks, bit = self._blocks[slot], 1 << slot
        for block_hash in hashes:
            if block_hash in blocks:
                continue
            if self.num_entries >= self._max_entries:
                self.num_untracked += 1
                continue
            blocks.add(block_hash)
            holders = self._holders.get(block_hash)
            self._holders[block_hash] = bit if holders is None else holders | bit
            self.num_entries += 1

    def remove(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker has evicted these blocks; unknown ones are ignored."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        for block_hash in hashes:
            if block_hash in self._blocks[slot]:
                self._blocks[slot].remove(block_hash)
                self._unset(block_hash, slot)

    def drop(self, worker_id: WorkerId) -> None:
        """The worker has no blocks from now on. Constant time: `purge` does the rest."""
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            self._workers[slot] = None
            self._live &= ~(1 << slot)
            self._retired.append(slot)

    def purge(self, max_blocks: int) -> bool:
        """Free the memory of up to `max_blocks` entries of dropped workers; True while there are more."""
        while self._retired and max_blocks > 0:
            slot = self._retired[0]
            blocks = self._blocks[slot]
            while blocks and max_blocks > 0:
                self._unset(blocks.pop(), slot)
                max_blocks -= 1
            if not blocks:
                self._free_slots.append(self._retired.popleft())
        return bool(self._retired)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks of `hashes` each worker has; workers that lack the first are left out."""
        found: dict[WorkerId, int] = {}
        if not hashes:
            return found
        matching = self._live & self._holders.get(hashes[0], 0)
        for depth in range(1, len(hashes)):
            if not matching:
                return found
            still_matching = matching & self._holders.get(hashes[depth], 0)
            if still_matching != matching:
                self._collect(matching & ~still_matching, depth, found)
                matching = still_matching
        self._collect(matching, len(hashes), found)
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError if the two directions of the map disagree."""
        pairs = {(block_hash, slot) for slot, blocks in enumerate(self._blocks) for block_hash in blocks}
        bits = {
            (block_hash, slot)
            for block_hash, holders in self._holders.items()
            for slot in range(len(self._workers))
            if holders >> slot & 1
        }
        assert pairs == bits
        assert len(pairs) == self.num_entries <= self._max_entries
        assert all(self._holders.values())
        assert self._live == sum(1 << slot for slot in self._slots.values())
        assert all(self._workers[slot] == worker_id for worker_id, slot in self._slots.items())
        slots = sorted([*self._slots.values(), *self._free_slots, *self._retired])
        assert slots == list(range(len(self._workers)))

    def _assign_slot(self, worker_id: WorkerId) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._workers[slot] = worker_id
        else:
            slot = len(self._workers)
            self._workers.append(worker_id)
            self._blocks.append(set())
        self._slots[worker_id] = slot
        self._live |= 1 << slot
        return slot

    def _unset(self, block_hash: BlockHash, slot: int) -> None:
        holders = self._holders[block_hash] & ~(1 << slot)
        if holders:
            self._holders[block_hash] = holders
        else:
            del self._holders[block_hash]
        self.num_entries -= 1

    def _collect(self, bits: int, depth: int, found: dict[WorkerId, int]) -> None:
        while bits:
            lowest = bits & -bits
            worker_id = self._workers[lowest.bit_length() - 1]
            assert worker_id is not None
            found[worker_id] = depth
            bits ^= lowest
