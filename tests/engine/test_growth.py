"""What one step and one allocation cost does not grow with the pool or with the number of waiting sequences.

Cost is the number of Python lines executed, which no neighbour on the machine can change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.fakes.model_runner import make_request
from weir.core.block_hash import BlockHash
from weir.engine.block_pool import BlockPool
from weir.engine.kv_cache_manager import KvCacheManager
from weir.engine.scheduler import Scheduler
from weir.engine.sequence import Sequence


def count_lines(work: Callable[[], object]) -> int:
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("is_cached", [False, True])
def test_allocation_costs_the_same_in_any_pool(is_cached: bool) -> None:
    costs = []
    for num_blocks in (1_000, 1_000_000):
        pool = BlockPool(num_blocks)
        pool.take_events()
        if is_cached:
            chain = pool.allocate(900)
            for block_id in chain:
                pool.publish(block_id, BlockHash(block_id.to_bytes(16, "little")))
            pool.release(chain)

        def work(pool: BlockPool = pool) -> None:
            pool.release(pool.allocate(50))

        costs.append(count_lines(work))
    assert costs[0] == costs[1]


def make_bench(num_waiting: int, num_blocks: int, *, shares_prefix: bool) -> Scheduler:
    """Eight sequences decode, all seats are taken or blocks are short, and the rest wait."""
    scheduler = Scheduler(KvCacheManager(num_blocks, 4), max_num_seqs=8, max_num_batched_tokens=64)
    for arrival in range(8 + num_waiting):
        first = 1 if shares_prefix else arrival % 40
        request = make_request(f"s{arrival}", [first] * 6, max_tokens=1000, priority=arrival % 3)
        scheduler.add(Sequence(request, arrival=arrival, arrived_s=0.0))
    for _ in range(4):
        finish_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (8, num_waiting)
    return scheduler


def finish_step(scheduler: Scheduler) -> None:
    for chunk in scheduler.schedule().chunks:
        scheduler.launch(chunk)
        scheduler.advance(chunk)
        if chunk.sequence.num_uncomputed_tokens == 0:
            chunk.sequence.append(1)


@pytest.mark.parametrize("shares_prefix", [False, True])
def test_step_costs_the_same_for_any_number_waiting_and_any_pool(shares_prefix: bool) -> None:
    small, large = (
        make_bench(num_waiting, num_blocks, shares_prefix=shares_prefix)
        for num_waiting, num_blocks in ((1, 1_000), (1_000, 1_000_000))
    )
    costs = [count_lines(lambda scheduler=scheduler: finish_step(scheduler)) for scheduler in (small, large)]
    assert costs[0] == costs[1]


def test_admission_costs_at_most_logarithmically_more() -> None:
    costs = []
    for num_waiting, num_blocks in ((10, 1_000), (10_000, 1_000_000)):
        scheduler = make_bench(num_waiting, num_blocks, shares_prefix=False)
        leaving = scheduler.schedule().chunks[0].sequence

        def work(scheduler: Scheduler = scheduler, leaving: Sequence = leaving) -> None:
            scheduler.remove(leaving)
            finish_step(scheduler)

        costs.append(count_lines(work))
    assert costs[1] < 1.5 * costs[0]
