"""BlockPool: exact order, references and content."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.core.block_hash import BlockHash
from weir.engine.block_pool import BlockPool


def name(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "little"))


def publish_all(pool: BlockPool, block_ids: list[int], first_name: int = 0) -> None:
    for offset, block_id in enumerate(block_ids):
        pool.publish(block_id, name(first_name + offset))


def test_fresh_pool_gives_blocks_in_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert list(pool.free_block_ids()) == [2, 3, 4]
    assert pool.num_free == 3


def test_release_returns_chain_tail_first() -> None:
    pool = BlockPool(6)
    chain = pool.allocate(3)
    publish_all(pool, chain)
    pool.release(chain)
    assert list(pool.free_block_ids()) == [3, 4, 5, 2, 1, 0]


def test_blocks_without_content_go_first() -> None:
    pool = BlockPool(6)
    chain = pool.allocate(4)
    publish_all(pool, chain[:2])
    pool.release(chain)
    assert list(pool.free_block_ids()) == [2, 3, 4, 5, 1, 0]


def test_older_content_is_evicted_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    publish_all(pool, first, 0)
    publish_all(pool, second, 10)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(3) == [3, 2, 1]
    assert [pool.find(name(index)) for index in (0, 1, 10, 11)] == [0, None, None, None]


def test_acquire_takes_a_free_block_out_with_its_content() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, name(7))
    pool.release([block])
    pool.acquire([block])
    assert list(pool.free_block_ids()) == [1, 2]
    assert pool.find(name(7)) == block
    assert pool.ref_count(block) == 1


def test_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_second_block_of_same_content_stays_private() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, name(1))
    pool.publish(second, name(1))
    assert pool.find(name(1)) == first
    assert pool.hash_of(second) is None


def test_forget_all_is_refused_while_a_block_is_referenced() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(2)
    publish_all(pool, chain)
    assert not pool.forget_all()
    assert pool.find(name(0)) == 0
    pool.release(chain)
    assert pool.forget_all()
    assert pool.find(name(0)) is None
    pool.check_integrity()


def test_events_tell_what_was_stored_and_evicted() -> None:
    pool = BlockPool(2)
    assert pool.take_events().cleared
    assert not pool.has_events
    chain = pool.allocate(2)
    publish_all(pool, chain)
    assert pool.take_events().stored == (name(0), name(1))
    pool.release(chain)
    pool.allocate(1)
    events = pool.take_events()
    assert (events.stored, events.removed, events.cleared) == ((), (name(1),), False)


@pytest.mark.parametrize("break_it", ["leak", "twice", "count", "maps"])
def test_check_integrity_sees_broken_laws(break_it: str) -> None:
    pool = BlockPool(8)
    chain = pool.allocate(3)
    publish_all(pool, chain)
    pool.check_integrity()
    match break_it:
        case "leak":
            pool._ref_counts[chain[0]] = 0
        case "twice":
            pool._next[5] = 4
        case "count":
            pool.num_free += 1
        case "maps":
            pool._hash_of[6] = name(99)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_release_without_reference_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([1])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that is a plain list and plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.free = list(range(7))
        self.refs = [0] * 7
        self.content: dict[int, BlockHash] = {}
        self.chains: list[list[int]] = []
        self.seen: set[BlockHash] = set()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        taken = self.pool.allocate(count)
        assert taken == self.free[:count]
        del self.free[:count]
        for block in taken:
            self.refs[block] = 1
            self.content.pop(block, None)
        if taken:
            self.chains.append(taken)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        self.pool.acquire(chain)
        for block in chain:
            self.refs[block] += 1
        self.chains.append(list(chain))

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        assert self.pool.find(self.content[block]) == block
        self.pool.acquire([block])
        if self.refs[block] == 0:
            self.free.remove(block)
        self.refs[block] += 1
        self.chains.append([block])

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release(chain)
        for block in reversed(chain):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if block in self.content:
                    self.free.append(block)
                else:
                    self.free.insert(0, block)

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), index=st.integers(0, 9))
    def publish(self, data: st.DataObject, index: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.chains))))
        self.pool.publish(block, name(index))
        if block not in self.content and name(index) not in self.content.values():
            self.content[block] = name(index)

    @rule()
    def read_events(self) -> None:
        events = self.pool.take_events()
        if events.cleared:
            self.seen = set()
        self.seen = (self.seen - set(events.removed)) | set(events.stored)
        assert self.seen == set(self.content.values())

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == (len(self.free) == 7)
        if len(self.free) == 7:
            self.content.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert list(self.pool.free_block_ids()) == self.free
        assert [self.pool.ref_count(block) for block in range(7)] == self.refs
        assert set(self.pool.content()) == set(self.content.values())


TestPoolMachine = PoolMachine.TestCase
