"""The decode worker's end: the pool, attempts, and how every fetch ends."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.settings import ConnectionTiming, ReceiverConfig, SenderConfig
from kv_transfer.transfer_state import EndReason, Seal
from tests.fakes.kv_blocks import FakeSink
from tests.fakes.virtual_loop import virtual_clock
from tests.kv_transfer.hand_off_world import NUM_TOKENS, World, in_world
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_key
from weir.core.errors import ConfigError, ConflictError, DeadlineExceededError, HandoffLostError, WorkerLostError

SEAL = Seal(num_tokens=NUM_TOKENS, first_token=FIRST_TOKEN)


def test_fetches_to_one_address_share_a_connection() -> None:
    async def law(world: World) -> None:
        keys = [make_key(f"h{index}") for index in range(5)]
        async with asyncio.TaskGroup() as tasks:
            for key in keys:
                world.offer(key)
                tasks.create_task(world.fetch(key))
        assert len(world.network.endpoints) == 2
        assert world.clients["d"].stats.handoffs_total == 5

    in_world(law)


def test_a_lost_connection_is_made_anew_and_the_fetch_goes_on() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)
        num_asked = 0
        has_begun = asyncio.Event()

        async def sink_ready() -> FakeSink:
            nonlocal num_asked
            num_asked += 1
            has_begun.set()
            return FakeSink(LAYOUT, NUM_TOKENS)

        async with asyncio.TaskGroup() as tasks:
            fetch = tasks.create_task(world.fetch(sink_ready=sink_ready))
            offer.extend(2)
            await has_begun.wait()
            await asyncio.sleep(0.01)
            world.network.endpoints[0].abort()
            await asyncio.sleep(0.2)
            offer.seal(SEAL)
        assert num_asked == 1
        assert fetch.result().size_bytes == 3 * LAYOUT.block_bytes, "what was verified is not sent again"
        assert len(world.network.endpoints) == 4

    in_world(law)


def test_a_connection_lost_while_the_sink_is_made_costs_nothing() -> None:
    async def law(world: World) -> None:
        world.offer()

        async def sink_ready() -> FakeSink:
            world.network.endpoints[0].abort()
            await asyncio.sleep(0.5)
            return FakeSink(LAYOUT, NUM_TOKENS)

        await world.fetch(sink_ready=sink_ready)

    assert in_world(law).ended == [(make_key(), EndReason.COMMITTED)]


def test_nobody_there_is_a_lost_worker_after_a_few_attempts_that_all_callers_share() -> None:
    async def law(world: World) -> None:
        num_attempts = 0
        connect = world.network.connect

        async def counting(address: str, make_connection: object) -> object:
            nonlocal num_attempts
            num_attempts += 1
            await asyncio.sleep(0.01)
            return await connect(address, make_connection)  # type: ignore[arg-type]

        world.network.connect = counting  # type: ignore[method-assign,assignment]

        async def fetch(index: int) -> None:
            with pytest.raises(WorkerLostError, match="nobody listens"):
                await world.fetch(make_key(f"h{index}"), address="nowhere")

        async with asyncio.TaskGroup() as tasks:
            for index in range(20):
                tasks.create_task(fetch(index))
        assert num_attempts <= 8
        assert world.clients["d"].stats.failures_by_reason == {"worker_lost": 20}
        assert "nowhere" not in world.clients["d"]._pool, "an address that nobody uses is forgotten"

    in_world(law)


def test_a_caller_that_leaves_while_it_connects_leaves_the_attempt_to_the_next() -> None:
    async def law(world: World) -> None:
        connect = world.network.connect

        async def slow(address: str, make_connection: object) -> object:
            await asyncio.sleep(0.3)
            return await connect(address, make_connection)  # type: ignore[arg-type]

        world.network.connect = slow  # type: ignore[method-assign,assignment]
        world.offer(make_key("b"))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(world.fetch(make_key("a")))
            await asyncio.sleep(0.01)
            tasks.create_task(world.fetch(make_key("b")))
            await asyncio.sleep(0.1)
            first.cancel()

    assert in_world(law).ended == [(make_key("b"), EndReason.COMMITTED)]


def test_the_same_hand_off_is_fetched_once_at_a_time() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.fetch())
            await asyncio.sleep(0.1)
            with pytest.raises(ConflictError):
                await world.fetch()
            offer.seal(SEAL)

    assert in_world(law).ended == [(make_key(), EndReason.COMMITTED)]


def test_a_sink_that_cannot_be_made_ends_the_hold_and_its_error_is_raised() -> None:
    async def law(world: World) -> None:
        world.offer()

        async def sink_ready() -> FakeSink:
            raise HandoffLostError("the claim is gone")

        with pytest.raises(HandoffLostError, match="the claim is gone"):
            await world.fetch(sink_ready=sink_ready)

    world = in_world(law)
    assert world.ended == [(make_key(), EndReason.ABORTED)]


def test_a_time_out_of_the_sink_s_own_is_not_taken_for_the_deadline() -> None:
    async def law(world: World) -> None:
        world.offer()

        async def sink_ready() -> FakeSink:
            raise TimeoutError("the engine")

        with pytest.raises(TimeoutError, match="the engine"):
            await world.fetch(sink_ready=sink_ready)

    in_world(law)


def test_a_deadline_ends_a_fetch_at_any_point() -> None:
    async def law(world: World) -> None:
        world.offer()

        async def sink_ready() -> FakeSink:
            await asyncio.Event().wait()
            raise AssertionError

        for address, ready in (("p", sink_ready), ("nowhere", None)):
            started_s = virtual_clock()
            with pytest.raises((DeadlineExceededError, WorkerLostError)):
                await world.fetch(sink_ready=ready, timeout_s=0.3, address=address)
            assert virtual_clock() - started_s <= 0.36

    in_world(law)


def test_a_hand_off_that_has_begun_and_of_which_nobody_says_that_it_is_being_computed_is_given_up() -> None:
    async def law(world: World) -> None:
        world.offer(is_sealed=False).extend(1)
        started_s = virtual_clock()
        with pytest.raises(WorkerLostError, match="nothing came"):
            await world.fetch()
        assert 10.0 <= virtual_clock() - started_s < 11.0

    slow_to_speak = SenderConfig(timing=ConnectionTiming(heartbeat_s=20.0, idle_timeout_s=60.0))
    patient = ReceiverConfig(timing=ConnectionTiming(idle_timeout_s=60.0))
    world = in_world(law, sender=slow_to_speak, receiver=patient)
    assert world.ended == [(make_key(), EndReason.ABORTED)]


def test_a_prefill_worker_that_lives_may_compute_for_as_long_as_the_deadline_allows() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)
        offer.extend(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.fetch())
            await asyncio.sleep(300.0)
            offer.extend(2)
            await asyncio.sleep(300.0)
            offer.seal(SEAL)

    assert in_world(law).ended == [(make_key(), EndReason.COMMITTED)]


def test_before_it_begins_only_the_deadline_bounds_a_fetch() -> None:
    async def law(world: World) -> None:
        offer = world.offer(is_sealed=False)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.fetch())
            await asyncio.sleep(300.0)
            offer.seal(SEAL)

    assert in_world(law).ended == [(make_key(), EndReason.COMMITTED)]


def test_waiting_for_its_own_sink_is_the_progress_that_a_decode_worker_owes() -> None:
    async def law(world: World) -> None:
        world.offer()
        client = world.clients["d"]

        async def sink_ready() -> FakeSink:
            await asyncio.sleep(4.0)
            assert client.oldest_progress_age_s == pytest.approx(4.0, abs=0.1)
            assert client.num_in_flight == 1
            return FakeSink(LAYOUT, NUM_TOKENS)

        await world.fetch(sink_ready=sink_ready)
        assert (client.oldest_progress_age_s, client.num_in_flight) == (0.0, 0)

    in_world(law)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: ReceiverConfig(window_bytes=1), "window_bytes"),
        (lambda: ReceiverConfig(initial_credit_bytes=1), "initial_credit_bytes"),
        (lambda: ReceiverConfig(max_attempts=0), "max_attempts"),
        (lambda: SenderConfig(frame_bytes=2 << 20), "frame_bytes"),
        (lambda: SenderConfig(lease_s=0.0), "lease_s"),
        (lambda: ConnectionTiming(heartbeat_s=1.0, idle_timeout_s=1.5), "idle_timeout_s"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(make: object, param: str) -> None:
    with pytest.raises(ConfigError, match=param) as error:
        make()  # type: ignore[operator]
    assert error.value.param == param
