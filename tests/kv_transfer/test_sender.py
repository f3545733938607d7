"""The prefill worker's end: who may fetch, what is parked, when a hold ends."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.ended_handoffs import REMEMBERED_S
from kv_transfer.settings import SenderConfig
from kv_transfer.transfer_state import EndReason
from tests.fakes.virtual_loop import virtual_clock
from tests.kv_transfer.hand_off_world import World, in_world
from tests.kv_transfer.identities import make_key
from weir.core.deadline import Deadline
from weir.core.errors import ConflictError, HandoffLostError, WorkerLostError

SHORT = SenderConfig(lease_s=10.0, park_timeout_s=2.0)


def test_a_committed_hold_ends_once_and_its_blocks_come_back() -> None:
    async def law(world: World) -> None:
        offer = world.offer()
        await world.fetch()
        await asyncio.sleep(0.01)
        assert not offer.is_held
        assert (world.server.num_held, world.server.num_unreleased) == (0, 0)

    world = in_world(law)
    assert world.ended == [(make_key(), EndReason.COMMITTED)]
    assert world.server.stats.handoffs_total == 1


@pytest.mark.parametrize("wait_s", [0.0, 1.9])
def test_a_fetch_may_come_before_its_offer(wait_s: float) -> None:
    async def law(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.fetch())
            await asyncio.sleep(wait_s)
            world.offer()

    assert in_world(law, sender=SHORT).ended == [(make_key(), EndReason.COMMITTED)]


def test_a_fetch_of_something_unknown_is_refused_after_a_short_while() -> None:
    async def law(world: World) -> None:
        started_s = virtual_clock()
        with pytest.raises(HandoffLostError, match="unknown here"):
            await world.fetch()
        assert 2.0 <= virtual_clock() - started_s < 3.0

    assert in_world(law, sender=SHORT).server.stats.refused_total == 1


def test_too_many_parked_fetches_are_refused_at_once() -> None:
    async def law(world: World) -> None:
        with pytest.raises(HandoffLostError, match="too many"):
            await world.fetch()

    in_world(law, sender=SenderConfig(max_parked=0))


def test_a_parked_fetch_that_is_cancelled_is_gone() -> None:
    async def law(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await world.fetch()
        await asyncio.sleep(0.01)
        world.offer()
        await asyncio.sleep(0.01)
        assert world.server.num_in_flight == 0
        assert world.server.num_held == 1

    in_world(law, sender=SHORT)


def test_another_decode_worker_waits_until_the_gateway_binds_the_hold_to_it() -> None:
    async def law(world: World) -> None:
        world.offer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.fetch(by="e"))
            await asyncio.sleep(0.5)
            assert world.server.num_in_flight == 0
            world.server.rebind(make_key(), "e-1")

    assert in_world(law, sender=SHORT).ended == [(make_key(), EndReason.COMMITTED)]


def test_another_decode_worker_is_refused_if_nobody_binds_it() -> None:
    async def law(world: World) -> None:
        world.offer()
        with pytest.raises(HandoffLostError, match="bound to another"):
            await world.fetch(by="e")
        assert world.server.num_held == 1

    in_world(law, sender=SHORT)


def test_an_offer_may_be_bound_to_nobody_yet() -> None:
    async def law(world: World) -> None:
        world.offer(decode="")
        world.server.rebind(make_key(), "e-1")
        await world.fetch(by="e")

    in_world(law)


def test_rebinding_takes_the_hold_from_the_one_that_fetches() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)

        async def first() -> None:
            with pytest.raises(HandoffLostError, match="bound to another"):
                await world.fetch(by="d")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first())
            await asyncio.sleep(0.1)
            world.server.rebind(make_key(), "e-1")
        assert offer.is_held
        assert world.ended == []

    in_world(law, sender=SHORT)


def test_only_a_held_hand_off_can_be_rebound_or_renewed() -> None:
    async def law(world: World) -> None:
        with pytest.raises(HandoffLostError, match="unknown here"):
            world.server.rebind(make_key(), "e-1")
        assert not world.server.renew(make_key())
        world.offer()
        assert world.server.renew(make_key())
        assert world.server.release(make_key())
        with pytest.raises(HandoffLostError, match="released"):
            world.server.rebind(make_key(), "e-1")
        assert not world.server.renew(make_key())

    in_world(law)


def test_release_ends_the_hold_at_any_epoch_up_to_the_key_s_and_is_idempotent() -> None:
    async def law(world: World) -> None:
        world.offer(make_key(epoch=3))
        assert not world.server.release(make_key(epoch=2))
        assert world.server.release(make_key(epoch=9))
        assert not world.server.release(make_key(epoch=9))
        assert not world.server.release(make_key("unknown"))

    assert in_world(law).ended == [(make_key(epoch=3), EndReason.RELEASED)]


def test_a_release_reaches_the_one_that_fetches() -> None:
    async def law(world: World) -> None:
        world.offer(is_sealed=False)

        async def fetch() -> None:
            with pytest.raises(HandoffLostError, match="released"):
                await world.fetch()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fetch())
            await asyncio.sleep(0.1)
            world.server.release(make_key())

    in_world(law)


def test_a_new_epoch_takes_the_place_of_the_old_one() -> None:
    async def law(world: World) -> None:
        world.offer(make_key(epoch=1))
        world.offer(make_key(epoch=2))
        assert world.ended == [(make_key(epoch=1), EndReason.SUPERSEDED)]
        with pytest.raises(HandoffLostError, match="epoch 2 has taken its place"):
            await world.fetch(make_key(epoch=1))
        assert world.server.stats.stale_frames_total == 1
        await world.fetch(make_key(epoch=2))

    in_world(law)


def test_an_epoch_is_offered_once_and_none_after_a_newer_one() -> None:
    async def law(world: World) -> None:
        world.offer(make_key(epoch=2))
        for epoch in (1, 2):
            with pytest.raises(ConflictError, match="after epoch 2"):
                world.offer(make_key(epoch=epoch))
        world.server.release(make_key(epoch=2))
        with pytest.raises(ConflictError):
            world.offer(make_key(epoch=2))

    in_world(law)


def test_a_hold_that_nobody_fetches_ends_with_its_lease_without_any_new_work() -> None:
    async def law(world: World) -> None:
        world.offer()
        await asyncio.sleep(9.9)
        assert world.server.num_held == 1
        await asyncio.sleep(1.2)
        assert world.ended == [(make_key(), EndReason.EXPIRED)]
        with pytest.raises(HandoffLostError, match="expired"):
            await world.fetch()

    assert in_world(law, sender=SHORT).server.stats.leases_expired_total == 1


def test_the_lease_clock_starts_with_the_seal() -> None:
    async def law(world: World) -> None:
        world.offer(is_sealed=False)
        await asyncio.sleep(60.0)
        assert world.server.num_held == 1

    in_world(law, sender=SHORT)


def test_a_hold_ends_at_the_client_s_deadline_sealed_or_not() -> None:
    async def law(world: World) -> None:
        world.offer(is_sealed=False, deadline=Deadline.after(3.0, virtual_clock))
        await asyncio.sleep(4.1)
        assert world.ended == [(make_key(), EndReason.EXPIRED)]

    in_world(law, sender=SHORT)


def test_the_gateway_s_renewals_keep_a_hold_that_nobody_fetches() -> None:
    async def law(world: World) -> None:
        world.offer()
        for _ in range(10):
            await asyncio.sleep(6.0)
            assert world.server.renew(make_key())
        assert world.server.num_held == 1

    in_world(law, sender=SHORT)


def test_a_decode_worker_s_renewals_keep_what_it_fetches() -> None:
    async def law(world: World) -> None:
        world.offer()

        async def sink_ready() -> object:
            await asyncio.sleep(60.0)
            raise WorkerLostError("no sink")

        with pytest.raises(WorkerLostError, match="no sink"):
            await world.fetch(sink_ready=sink_ready)  # type: ignore[arg-type]

    assert in_world(law, sender=SHORT).ended == [(make_key(), EndReason.ABORTED)]


def test_a_failure_of_the_computation_ends_hold_and_fetch() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)

        async def fetch() -> None:
            with pytest.raises(HandoffLostError, match="the prompt was aborted"):
                await world.fetch()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fetch())
            await asyncio.sleep(0.1)
            offer.fail(HandoffLostError("the prompt was aborted"))
        offer.extend(1)
        offer.fail(HandoffLostError("again"))

    assert in_world(law).ended == [(make_key(), EndReason.FAILED)]


def test_leaving_the_server_ends_what_is_held() -> None:
    async def law(world: World) -> None:
        world.offer(make_key("a"))
        world.offer(make_key("b"), is_sealed=False)

    world = in_world(law)
    assert world.ended == [(make_key("a"), EndReason.CLOSED), (make_key("b"), EndReason.CLOSED)]


def test_oldest_progress_age_is_zero_while_nobody_owes_anything() -> None:
    async def law(world: World) -> None:
        assert world.server.oldest_progress_age_s == 0.0
        world.offer()
        await asyncio.sleep(5.0)
        assert world.server.oldest_progress_age_s == 0.0

    in_world(law, sender=SHORT)


def test_the_end_of_a_hand_off_is_forgotten_after_a_while() -> None:
    async def law(world: World) -> None:
        world.offer()
        await world.fetch()
        await asyncio.sleep(REMEMBERED_S - 1.0)
        with pytest.raises(ConflictError):
            world.offer()
        await asyncio.sleep(3.0)
        assert world.offer().is_held, "nothing is left that grows with every hand-off"

    in_world(law)
