from __future__ import annotations

import asyncio

import pytest

from prefill_service.held_blocks import HeldBlockBudget
from weir.core.errors import CapacityExceededError, OverloadedError


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_fits_is_given_at_once() -> None:
    budget = HeldBlockBudget(10, max_waiting=1)
    await budget.take(4)
    await budget.take(6)
    assert (budget.num_taken, budget.num_waiting) == (10, 0)


async def test_more_than_there_will_ever_be_is_refused_by_name() -> None:
    budget = HeldBlockBudget(10, max_waiting=1)
    with pytest.raises(CapacityExceededError, match="11 KV blocks, above the 10"):
        await budget.take(11)


async def test_a_full_line_refuses_and_says_when_to_come_back() -> None:
    budget = HeldBlockBudget(1, max_waiting=0, retry_after_s=2.5)
    await budget.take(1)
    with pytest.raises(OverloadedError) as caught:
        await budget.take(1)
    assert caught.value.retry_after_s == 2.5


async def test_shares_are_given_in_order_of_arrival_also_where_a_later_one_would_fit() -> None:
    budget = HeldBlockBudget(10, max_waiting=8)
    await budget.take(8)
    order: list[str] = []

    async def take(name: str, num_blocks: int) -> None:
        await budget.take(num_blocks)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(take("large", 6))
        group.create_task(take("small", 1))
        await settle()
        assert (order, budget.num_waiting) == ([], 2)
        budget.give_back(8)
    assert order == ["large", "small"]
    assert budget.num_taken == 7


async def test_whoever_leaves_the_line_lets_the_next_one_through() -> None:
    budget = HeldBlockBudget(10, max_waiting=8)
    await budget.take(8)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(budget.take(6))
        small = group.create_task(budget.take(2))
        await settle()
        large.cancel()
        await settle()
        assert small.done()
    assert (budget.num_taken, budget.num_waiting) == (10, 0)


async def test_a_share_given_in_the_moment_of_cancellation_is_returned() -> None:
    budget = HeldBlockBudget(4, max_waiting=8)
    await budget.take(4)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(budget.take(4))
        await settle()
        budget.give_back(4)  # its turn has come, and it has not run yet
        waiting.cancel()
    assert (budget.num_taken, budget.num_waiting) == (0, 0)
    await budget.take(4)


async def test_a_cancelled_place_that_was_not_cleared_yet_is_passed_over() -> None:
    budget = HeldBlockBudget(4, max_waiting=8)
    await budget.take(4)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(budget.take(4))
        second = group.create_task(budget.take(4))
        await settle()
        first.cancel()
        budget.give_back(4)  # before the cancelled one has noticed
        await settle()
        assert second.done()
    assert budget.num_taken == 4
