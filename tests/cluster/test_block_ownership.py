"""Laws of the mirror of block ownership, on a real server."""

import asyncio

import pytest

from tests.cluster.samples import ManualClock, connect, until
from tests.fakes.redis_server import RedisServer
from weir.cluster import keys
from weir.cluster.block_ownership import BlockGroup, BlockOwnership, Holding, HoldingKind, OwnershipRecorder
from weir.cluster.connection import RedisConnection
from weir.core.deadline import Deadline
from weir.core.request import HandoffId, HandoffKey, RequestId
from weir.core.worker import Incarnation, WorkerId

R1, R2 = RequestId("r1"), RequestId("r2")
H1, H2 = HandoffKey(HandoffId("h1"), 0), HandoffKey(HandoffId("h2"), 1)
GROUPS = (BlockGroup(first_block=0, num_blocks=4), BlockGroup(first_block=8, num_blocks=1))
SOURCE, DESTINATION = HoldingKind


def recorder(connection: RedisConnection, worker_id: str, incarnation: str = "a", **bounds: int) -> OwnershipRecorder:
    return OwnershipRecorder(connection, WorkerId(worker_id), Incarnation(incarnation), **bounds)  # type: ignore[arg-type]


def summary(holdings: tuple[Holding, ...]) -> list[tuple[str, str, str, str]]:
    return sorted((held.request_id, held.worker_id, held.key.handoff_id, held.kind.value) for held in holdings)


async def test_both_sides_of_a_hand_off_are_seen_by_request_and_by_worker(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        async with recorder(connection, "p1") as prefill, recorder(connection, "d1") as decode:
            prefill.record_source(R1, H1, GROUPS, Deadline.after(30))
            prefill.record_source(R2, H2, GROUPS, Deadline.after(30))
            decode.record_destination(R1, H1, (BlockGroup(first_block=0, num_blocks=9),), Deadline.after(60))
            await prefill.wait_until_sent()
            await decode.wait_until_sent()
            ownership = BlockOwnership(connection)
            of_request = await ownership.by_request(R1)
            assert summary(of_request) == [("r1", "d1", "h1", "destination"), ("r1", "p1", "h1", "source")]
            source = next(holding for holding in of_request if holding.kind is SOURCE)
            assert (source.groups, source.key, source.incarnation) == (GROUPS, H1, "a")
            assert source.until.remaining_s() == pytest.approx(30, abs=1)
            of_worker = await ownership.by_worker(WorkerId("p1"))
            assert summary(of_worker) == [("r1", "p1", "h1", "source"), ("r2", "p1", "h2", "source")]
            assert await ownership.by_request(RequestId("unknown")) == ()
            assert await ownership.by_worker(WorkerId("unknown")) == ()


async def test_cleared_holding_is_gone_and_its_neighbour_stays(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, recorder(connection, "p1") as prefill:
        ownership = BlockOwnership(connection)
        prefill.record_source(R1, H1, GROUPS, Deadline.after(30))
        prefill.record_source(R1, H2, GROUPS, Deadline.after(30))
        await prefill.wait_until_sent()
        prefill.clear(R1, H1, SOURCE)
        prefill.clear(R1, H1, DESTINATION)
        await prefill.wait_until_sent()
        assert summary(await ownership.by_request(R1)) == [("r1", "p1", "h2", "source")]
        assert summary(await ownership.by_worker(WorkerId("p1"))) == [("r1", "p1", "h2", "source")]
        prefill.clear(R1, H2, SOURCE)
        await prefill.wait_until_sent()
        assert await ownership.by_request(R1) == ()
        assert redis_server.call("EXISTS", keys.held(WorkerId("p1")), keys.ownership(R1)) == 0


async def test_holding_whose_time_has_come_is_not_shown(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, recorder(connection, "p1") as prefill:
        ownership = BlockOwnership(connection)
        prefill.record_source(R1, H1, GROUPS, Deadline.after(0.05))
        prefill.record_source(R1, H2, GROUPS, Deadline.after(30))
        await prefill.wait_until_sent()
        await until(lambda: redis_server.call("HLEN", keys.ownership(R1)) == 2)
        async with asyncio.timeout(5):
            while len(await ownership.by_request(R1)) == 2:
                pass
        assert summary(await ownership.by_request(R1)) == [("r1", "p1", "h2", "source")]


async def test_renewal_moves_the_end(redis_server: RedisServer) -> None:
    clock = ManualClock()
    async with connect(redis_server.url) as connection:
        async with OwnershipRecorder(connection, WorkerId("p1"), Incarnation("a"), clock=clock) as prefill:
            for lease_s in (10, 100):
                prefill.record_source(R1, H1, GROUPS, Deadline.after(lease_s, clock))
                await prefill.wait_until_sent()
                (holding,) = await BlockOwnership(connection, clock=clock).by_request(R1)
                assert holding.until.remaining_s(clock) == pytest.approx(lease_s, abs=1)


async def test_restarted_worker_removes_what_its_earlier_incarnation_left(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        ownership = BlockOwnership(connection)
        async with recorder(connection, "p1", "a") as earlier, recorder(connection, "p2", "x") as neighbour:
            earlier.record_source(R1, H1, GROUPS, Deadline.after(30))
            earlier.record_source(R2, H2, GROUPS, Deadline.after(30))
            neighbour.record_source(R1, H1, GROUPS, Deadline.after(30))
            await earlier.wait_until_sent()
            await neighbour.wait_until_sent()
        async with recorder(connection, "p1", "b") as restarted:
            restarted.record_source(R1, H1, GROUPS, Deadline.after(30))
            await restarted.reconcile()
            await restarted.wait_until_sent()
            (holding,) = await ownership.by_worker(WorkerId("p1"))
            assert (holding.request_id, holding.incarnation) == (R1, "b")
            assert summary(await ownership.by_request(R1)) == [
                ("r1", "p1", "h1", "source"),
                ("r1", "p2", "h1", "source"),
            ]
            assert await ownership.by_request(R2) == ()


async def test_redis_that_comes_back_empty_gets_everything_again(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, recorder(connection, "p1") as prefill:
        prefill.record_source(R1, H1, GROUPS, Deadline.after(30))
        prefill.record_source(R2, H2, GROUPS, Deadline.after(30))
        await prefill.wait_until_sent()
        seen = connection.link.num_interruptions
        await asyncio.to_thread(redis_server.kill)
        prefill.clear(R1, H1, SOURCE)
        await asyncio.to_thread(redis_server.start)
        async with asyncio.timeout(5):
            await connection.link.wait_for_interruption(seen)
            await connection.link.wait_until_up()
        await until(lambda: redis_server.call("EXISTS", keys.ownership(R2)))
        ownership = BlockOwnership(connection)
        assert summary(await ownership.by_worker(WorkerId("p1"))) == [("r2", "p1", "h2", "source")]


async def test_memory_of_a_recorder_is_bounded(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, recorder(connection, "p1", max_holdings=10) as prefill:
        for index in range(100):
            prefill.record_source(RequestId(f"r{index}"), H1, GROUPS, Deadline.after(30))
        assert prefill.stats.num_pending <= 10
        await prefill.wait_until_sent()
        assert len(await BlockOwnership(connection).by_worker(WorkerId("p1"))) <= 20
