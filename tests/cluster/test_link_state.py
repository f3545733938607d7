import asyncio

from tests.cluster.samples import ManualClock
from weir.cluster.link_state import LinkState


def test_link_counts_as_up_only_since_the_last_interruption() -> None:
    clock = ManualClock()
    link = LinkState(clock)
    assert not link.has_been_up_for(0)
    link.mark_up()
    clock.advance(5)
    assert link.has_been_up_for(5)
    assert not link.has_been_up_for(5.1)
    link.mark_interrupted()
    assert link.is_up
    assert link.up_since_s == clock.now_s
    assert not link.has_been_up_for(1)


def test_marking_twice_is_marking_once() -> None:
    clock = ManualClock()
    link = LinkState(clock)
    link.mark_interrupted()
    link.mark_down()
    assert link.num_interruptions == 0
    link.mark_up()
    clock.advance(1)
    link.mark_up()
    assert link.has_been_up_for(1)
    link.mark_down()
    link.mark_down()
    assert link.num_interruptions == 1
    assert link.up_since_s is None


async def test_every_waiter_hears_of_a_change() -> None:
    link = LinkState()
    async with asyncio.TaskGroup() as group:
        waiters = [group.create_task(link.wait_until_up()) for _ in range(3)]
        waiters.append(group.create_task(link.wait_for_change()))
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        link.mark_up()
    seen = link.num_interruptions
    link.mark_down()
    await link.wait_for_interruption(seen)
