"""Gives sequences their blocks: finds cached prefixes, fills block tables, keeps promises and holds.

Four things name a block: the table of a sequence (also of one whose blocks a transfer is writing), and the holds that
keep a prefilled prompt for a hand-off. A claim names a count only. It decides nothing about who goes first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weir.core.block_hash import BlockHash
from weir.engine.block_pool import BlockPool
from weir.engine.cold_blocks import ColdBlocks
from weir.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Leading blocks of a sequence that are in the cache, found and not yet referenced.

    Attributes:
        num_free: how many of them nobody references: taking them shrinks the free list too.
        cold_hashes: what follows and is worth bringing back from under the pool.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_free: int = 0
    cold_hashes: tuple[BlockHash, ...] = ()


class KvCacheManager:
    """Block tables over one pool.

    Args:
        enable_prefix_caching: off means that nothing is hashed and nothing is found.
        cold: what is under the pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, cold: ColdBlocks | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks, cold)
        self.cold = cold
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._owners: set[Sequence] = set()
        self._holds: dict[str, tuple[int, ...]] = {}
        self._held: Counter[int] = Counter()
        self._num_claimed = 0
        # Growth of running sequences must not preempt somebody at once after an admission.
        self._watermark = max(1, num_blocks // 100)

    @property
    def num_available_blocks(self) -> int:
        """Free and not promised to anyone."""
        return self.pool.num_free - self._num_claimed

    @property
    def num_held_blocks(self) -> int:
        """Different blocks under holds."""
        return len(self._held)

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def has_hold(self, hold_id: str) -> bool:
        return hold_id in self._holds

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence, *, max_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix of full blocks within `max_tokens`; changes no block."""
        if not self.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return PrefixMatch()
        sequence.extend_hashes(self.block_size)
        found: list[int] = []
        num_free = 0
        wanted = sequence.block_hashes[: max_tokens // self.block_size]
        for block_hash in wanted:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
            num_free += self.pool.ref_count(block_id) == 0
        missing = wanted[len(found) :]
        return PrefixMatch(
            block_ids=tuple(found),
            num_tokens=len(found) * self.block_size,
            num_free=num_free,
            cold_hashes=tuple(missing[: self.cold.find_run(missing)]) if self.cold is not None else (),
        )

    def allocate(self, sequence: Sequence, match: PrefixMatch, *, keep_watermark: bool) -> bool:
        """Give a sequence without blocks its whole table: `match` and new blocks for its other known tokens.

        Its holds, if it has any, take their own references. What is cold of its prefix is on its way then: nobody may
        use the table before `finish_load`. False, and nothing changed, when the blocks are not there.
        """
        num_new = self.blocks_for(sequence.num_tokens) - len(match.block_ids)
        if not self._has_room(num_new + match.num_free, keep_watermark):
            return False
        if self.cold is not None:
            self.cold.touch(match.cold_hashes)  # what the new blocks held may need their room
        self._adopt(sequence, match)
        sequence.block_ids.extend(self.pool.allocate(num_new))
        for hold_id in sequence.hold_ids:
            self._hold(hold_id, tuple(sequence.block_ids))
        if match.cold_hashes and self.cold is not None:
            first, end = len(match.block_ids), len(match.block_ids) + len(match.cold_hashes)
            sequence.load = self.cold.start_load(match.cold_hashes, sequence.block_ids[first:end])
        return True

    def finish_load(self, sequence: Sequence) -> bool:
        """Whether the cold part of its prefix is in place, and counted; what is lost of it will be computed."""
        load = sequence.load
        if load is None:
            return True
        assert self.cold is not None
        self.cold.advance(load)
        if not load.is_done:
            return False
        self.cold.finish(load)
        sequence.load = None
        sequence.num_computed_tokens += len(load.block_hashes) * self.block_size
        self.publish(sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make the table cover every token known or late. False, and nothing changed, when no block is there."""
        num_new = self.blocks_for(sequence.num_expected_tokens) - len(sequence.block_ids)
        if num_new > 0:
            if num_new > self.num_available_blocks:
                return False
            sequence.block_ids.extend(self.pool.allocate(num_new))
        return True

    def claim(self, sequence: Sequence, match: PrefixMatch, *, keep_watermark: bool) -> bool:
        """Reference `match` and promise blocks for the other known tokens and the first new one.

        False, and nothing changed, when the blocks are not there.
        """
        num_new = self.blocks_for(sequence.num_tokens + 1) - len(match.block_ids)
        if not self._has_room(num_new + match.num_free, keep_watermark):
            return False
        self._adopt(sequence, match)
        sequence.num_claimed_blocks = num_new
        self._num_claimed += num_new
        return True

    def allocate_claimed(self, sequence: Sequence) -> None:
        """Turn the promise into blocks; a promise is always kept.

        Blocks that have come into the cache since the claim are shared instead of allocated.
        """
        num_known = len(sequence.block_ids)
        num_new = self._drop_claim(sequence)
        late = self.match(sequence, max_tokens=sequence.num_tokens).block_ids[num_known:]
        self.pool.acquire(late)
        sequence.block_ids.extend(late)
        sequence.num_computed_tokens = len(sequence.block_ids) * self.block_size
        sequence.num_published_blocks = len(sequence.block_ids)
        sequence.block_ids.extend(self.pool.allocate(num_new - len(late)))

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that `num_computed_tokens` has filled findable."""
        num_full = sequence.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= sequence.num_published_blocks:
            return
        sequence.extend_hashes(self.block_size)
        for index in range(sequence.num_published_blocks, num_full):
            self.pool.publish(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_published_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Take back the table and the promise of a sequence that ends or starts over. Its holds stay."""
        self._drop_claim(sequence)
        if sequence.load is not None and self.cold is not None:
            self.cold.give_up(sequence.load)
            sequence.load = None
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        self._owners.remove(sequence)

    def release_hold(self, hold_id: str) -> bool:
        """End a hold; False when there is none of this name."""
        block_ids = self._holds.pop(hold_id, None)
        if block_ids is None:
            return False
        self._held.subtract(block_ids)
        for block_id in block_ids:
            if not self._held[block_id]:
                del self._held[block_id]
        self.pool.release(block_ids)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError: says which law is broken."""
        self.pool.check_integrity()
        if self.cold is not None:
            self.cold.check_integrity()
        expected: Counter[int] = Counter()
        for sequence in self._owners:
            expected.update(sequence.block_ids)
            num_full = sequence.num_computed_tokens // self.block_size
            for index, block_id in enumerate(sequence.block_ids):
                block_hash = self.pool.hash_of(block_id)
                assert block_hash is None or index < num_full, f"block {block_id} is hashed before it is full"
                assert block_hash is None or block_hash == sequence.block_hashes[index], (
                    f"block {block_id} of {sequence.sequence_id} holds other tokens"
                )
        for block_ids in self._holds.values():
            expected.update(block_ids)
        for block_id, count in expected.items():
            assert self.pool.ref_count(block_id) == count, (
                f"block {block_id} has {self.pool.ref_count(block_id)} references, {count} are known"
            )
        assert len(expected) == self.pool.num_referenced, (
            f"{self.pool.num_referenced} blocks are referenced, {len(expected)} by someone known"
        )
        held = Counter(block_id for block_ids in self._holds.values() for block_id in block_ids)
        assert held == self._held, "held blocks are miscounted"
        num_claimed = sum(sequence.num_claimed_blocks for sequence in self._owners)
        assert num_claimed == self._num_claimed, "claimed blocks are miscounted"
        assert self.num_available_blocks >= 0, "more blocks are promised than free"

    def owners(self) -> tuple[Sequence, ...]:
        """Every sequence with a table or a promise."""
        return tuple(self._owners)

    def _has_room(self, num_blocks: int, keep_watermark: bool) -> bool:
        return num_blocks + (self._watermark if keep_watermark else 0) <= self.num_available_blocks

    def _adopt(self, sequence: Sequence, match: PrefixMatch) -> None:
        assert not sequence.block_ids, f"{sequence.sequence_id} already has blocks"
        self.pool.acquire(match.block_ids)
        sequence.block_ids = list(match.block_ids)
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_published_blocks = len(match.block_ids)
        self._owners.add(sequence)

    def _drop_claim(self, sequence: Sequence) -> int:
        num_claimed, sequence.num_claimed_blocks = sequence.num_claimed_blocks, 0
        self._num_claimed -= num_claimed
        return num_claimed

    def _hold(self, hold_id: str, block_ids: tuple[int, ...]) -> None:
        assert hold_id not in self._holds, f"hold {hold_id} exists"
        self.pool.acquire(block_ids)
        self._holds[hold_id] = block_ids
        self._held.update(block_ids)
