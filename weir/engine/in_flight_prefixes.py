"""Knows which full blocks are being computed right now and by whom, and parks whoever would compute them again.

It moves no sequence between queues: it names those whose wait is over, and the scheduler acts.
"""

from __future__ import annotations

from bisect import bisect_left

from weir.core.block_hash import BlockHash
from weir.engine.sequence import Sequence


class InFlightPrefixes:
    """Blocks between admission and publication, by hash.

    A sequence waits for the last block that it shares with the same owner, and so is woken once for each owner however
    long the common prefix is. It waits only for owners that are at least as urgent: they are running, so every step
    either brings them nearer or ends their ownership, and nobody waits for work that is itself held up.
    """

    def __init__(self) -> None:
        self._owner_of: dict[BlockHash, Sequence] = {}
        self._parked: dict[BlockHash, dict[str, Sequence]] = {}
        self.num_parked = 0

    def begin(self, sequence: Sequence) -> None:
        """`sequence` starts to compute its known full blocks from `num_published_blocks` on."""
        for block_hash in sequence.block_hashes[sequence.num_published_blocks :]:
            self._owner_of.setdefault(block_hash, sequence)

    def end(self, sequence: Sequence, block_hashes: list[BlockHash]) -> list[Sequence]:
        """These blocks of `sequence` are published, or will not be: the sequences that waited for them."""
        woken: list[Sequence] = []
        for block_hash in block_hashes:
            if self._owner_of.get(block_hash) is sequence:
                del self._owner_of[block_hash]
                woken.extend(self._parked.pop(block_hash, {}).values())
        for waiter in woken:
            waiter.awaited_hash = None
        self.num_parked -= len(woken)
        return woken

    def find_awaited(self, sequence: Sequence, *, first_block: int, num_blocks: int) -> BlockHash | None:
        """The block that `sequence`, short of its blocks from `first_block` on, had better wait for."""
        hashes = sequence.block_hashes
        if first_block >= num_blocks:
            return None
        owner = self._owner_of.get(hashes[first_block])
        if owner is None or owner.request.priority > sequence.request.priority:
            return None
        # Hashes are chained: what two sequences share is a prefix, so "shared with the owner" is true, then false.
        end = bisect_left(
            range(first_block, num_blocks), True, key=lambda index: self._owner_of.get(hashes[index]) is not owner
        )
        return hashes[first_block + end - 1]

    def park(self, sequence: Sequence, block_hash: BlockHash) -> None:
        sequence.awaited_hash = block_hash
        self._parked.setdefault(block_hash, {})[sequence.sequence_id] = sequence
        self.num_parked += 1

    def unpark(self, sequence: Sequence) -> None:
        """Forget a parked sequence that ends."""
        assert sequence.awaited_hash is not None
        waiters = self._parked[sequence.awaited_hash]
        del waiters[sequence.sequence_id]
        if not waiters:
            del self._parked[sequence.awaited_hash]
        sequence.awaited_hash = None
        self.num_parked -= 1

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError: an owner does not run, or somebody waits for a block that nobody computes."""
        for block_hash, owner in self._owner_of.items():
            assert owner in running, f"{owner.sequence_id} owns a block in flight and does not run"
            assert block_hash in owner.block_hashes, f"{owner.sequence_id} owns a block that is not its own"
        for block_hash, waiters in self._parked.items():
            assert waiters, "an empty set of waiters"
            assert block_hash in self._owner_of, f"{sorted(waiters)} wait for a block that nobody computes"
        assert self.num_parked == sum(map(len, self._parked.values())), "parked sequences are miscounted"
