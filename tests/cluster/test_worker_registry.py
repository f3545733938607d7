"""Laws of registration and of rule 13, on a real server."""

import asyncio
from dataclasses import replace

from tests.cluster.samples import ManualClock, connect, until, worker_info
from tests.fakes.redis_server import RedisServer
from weir.cluster import keys
from weir.cluster.connection import RedisConnection
from weir.cluster.worker_registry import Registration, WorkerDirectory
from weir.core.errors import UnavailableError
from weir.core.worker import WorkerId, WorkerInfo, WorkerLoad, WorkerState

TTL_S = 0.3


class Prober:
    """Stands for the direct health call; answers as told and remembers whom it was asked about."""

    def __init__(self, is_alive: bool = True) -> None:
        self.is_alive = is_alive
        self.asked: list[WorkerId] = []

    async def __call__(self, info: WorkerInfo) -> bool:
        self.asked.append(info.worker_id)
        return self.is_alive


def register(connection: RedisConnection, info: WorkerInfo, ttl_s: float = TTL_S) -> Registration:
    return Registration(connection, lambda: info, ttl_s=ttl_s)


def follow(connection: RedisConnection, prober: Prober, ttl_s: float = TTL_S) -> WorkerDirectory:
    return WorkerDirectory(connection, probe=prober, ttl_s=ttl_s, probe_timeout_s=0.2)


def names(directory: WorkerDirectory) -> list[str]:
    return [f"{info.worker_id}/{info.incarnation}" for info in directory.workers()]


async def test_registered_worker_is_seen_at_once_and_whole(redis_server: RedisServer) -> None:
    info = worker_info()
    async with connect(redis_server.url) as connection, register(connection, info):
        async with follow(connection, Prober()) as directory:
            assert directory.workers() == (info,)
            assert directory.find_worker(WorkerId("d1")) == info
            assert directory.find_worker(WorkerId("d2")) is None


async def test_joining_and_leaving_are_noticed_without_waiting_for_a_poll(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, follow(connection, Prober(), ttl_s=60) as directory:
        async with asyncio.timeout(5):
            async with register(connection, worker_info("d1"), ttl_s=60):
                await directory.wait_for_change(0)
                assert names(directory) == ["d1/a"]
                seen = directory.revision
            await directory.wait_for_change(seen)
            assert names(directory) == []


async def test_draining_is_announced_at_once(redis_server: RedisServer) -> None:
    state = WorkerState.READY
    async with connect(redis_server.url) as connection:
        async with Registration(connection, lambda: worker_info(state=state), ttl_s=60) as registration:
            async with follow(connection, Prober(), ttl_s=60) as directory:
                seen = directory.revision
                state = WorkerState.DRAINING
                registration.announce()
                async with asyncio.timeout(5):
                    await directory.wait_for_change(seen)
                assert directory.workers()[0].state is WorkerState.DRAINING


async def test_heartbeats_carry_the_load_and_are_no_change(redis_server: RedisServer) -> None:
    load = WorkerLoad(free_blocks=1)
    async with connect(redis_server.url) as connection:
        async with Registration(connection, lambda: worker_info(load=load), ttl_s=0.15):
            async with follow(connection, Prober(), ttl_s=0.15) as directory:
                revision = directory.revision
                load = WorkerLoad(free_blocks=2)
                await until(lambda: directory.workers()[0].load.free_blocks == 2)
                assert directory.revision == revision


async def test_worker_without_heartbeat_is_dropped_only_if_it_does_not_answer(redis_server: RedisServer) -> None:
    prober = Prober(is_alive=True)
    async with connect(redis_server.url) as connection, follow(connection, prober) as directory:
        await register(connection, worker_info())._heartbeat()  # one heartbeat, then the worker hangs
        await until(lambda: len(prober.asked) >= 3)
        assert names(directory) == ["d1/a"]
        seen = directory.revision
        prober.is_alive = False
        async with asyncio.timeout(5):
            await directory.wait_for_change(seen)
        assert names(directory) == []


async def test_probe_that_fails_or_hangs_is_a_failed_probe(redis_server: RedisServer) -> None:
    async def refuse(info: WorkerInfo) -> bool:
        if info.worker_id == "d1":
            raise UnavailableError("refused")
        await asyncio.Event().wait()
        return True

    async with connect(redis_server.url) as connection:
        for worker_id in ("d1", "d2"):
            await register(connection, worker_info(worker_id))._heartbeat()
        async with WorkerDirectory(connection, probe=refuse, ttl_s=TTL_S, probe_timeout_s=0.05) as directory:
            assert len(directory.workers()) == 2
            await until(lambda: not directory.workers())


async def test_lapse_while_the_own_link_was_not_up_for_a_whole_ttl_does_not_count(redis_server: RedisServer) -> None:
    """The clock of the link stands still: however long the lapse, rule 13 is not met until the link is old enough."""
    clock, prober = ManualClock(), Prober(is_alive=False)
    async with connect(redis_server.url, clock=clock) as connection, follow(connection, prober) as directory:
        await register(connection, worker_info())._heartbeat()
        async with asyncio.timeout(5):
            await directory.wait_for_change(0)
        await until(lambda: not redis_server.call("EXISTS", keys.worker(WorkerId("d1"))))
        async with register(
            connection, worker_info("other"), ttl_s=10
        ):  # its arrival shows that the directory has looked again
            await until(lambda: len(directory.workers()) == 2)
        await until(lambda: len(directory.workers()) == 1)
        assert names(directory) == ["d1/a"]
        assert prober.asked == []
        clock.advance(TTL_S + 1)
        await until(lambda: not directory.workers())
        assert prober.asked == ["d1"]


async def test_snapshot_stays_while_redis_is_away_and_workers_return_by_themselves(redis_server: RedisServer) -> None:
    prober = Prober(is_alive=False)
    async with connect(redis_server.url) as gateway, connect(redis_server.url) as worker:
        async with register(worker, worker_info(), ttl_s=5), follow(gateway, prober, ttl_s=5) as directory:
            assert names(directory) == ["d1/a"]
            await asyncio.to_thread(redis_server.kill)
            await until(lambda: not gateway.is_up)
            assert names(directory) == ["d1/a"]
            await asyncio.to_thread(redis_server.start)
            async with asyncio.timeout(5):
                await gateway.link.wait_until_up()
            await until(lambda: redis_server.call("EXISTS", keys.worker(WorkerId("d1"))))
            assert names(directory) == ["d1/a"]
            assert prober.asked == []


async def test_restarted_worker_replaces_its_earlier_incarnation(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, follow(connection, Prober()) as directory:
        async with register(connection, worker_info("d1", "a"), ttl_s=5) as earlier:
            await until(lambda: names(directory) == ["d1/a"])
            async with register(connection, worker_info("d1", "b"), ttl_s=5) as later:
                await until(lambda: names(directory) == ["d1/b"])
                earlier.announce()
                await until(lambda: earlier.superseded_by == "b")
                assert later.superseded_by is None
        await until(lambda: not directory.workers())


async def test_earlier_incarnation_can_neither_refresh_nor_deregister_a_later_one(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        earlier = register(connection, worker_info("d1", "a"), ttl_s=60)
        later = register(connection, worker_info("d1", "b"), ttl_s=60)
        await earlier._heartbeat()
        await later._heartbeat()
        await earlier._heartbeat()
        assert earlier.superseded_by == "b"
        await earlier._deregister()
        async with follow(connection, Prober()) as directory:
            assert names(directory) == ["d1/b"]


async def test_later_incarnation_wins_also_after_redis_lost_everything(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        earlier = register(connection, worker_info("d1", "a"), ttl_s=60)
        later = register(connection, worker_info("d1", "b"), ttl_s=60)
        await earlier._heartbeat()
        await later._heartbeat()
        redis_server.call("FLUSHALL")
        await earlier._heartbeat()
        await later._heartbeat()
        await earlier._heartbeat()
        assert (earlier.superseded_by, later.superseded_by) == ("b", None)


async def test_heartbeat_that_arrives_after_the_deregistration_does_not_bring_the_worker_back(
    redis_server: RedisServer,
) -> None:
    async with connect(redis_server.url) as connection:
        registration = register(connection, worker_info(), ttl_s=60)
        await registration._heartbeat()
        await registration._deregister()
        await registration._heartbeat()
        async with follow(connection, Prober()) as directory:
            assert names(directory) == []
        async with register(connection, worker_info("d1", "b"), ttl_s=60), follow(connection, Prober()) as directory:
            assert names(directory) == ["d1/b"]


async def test_registration_in_an_unknown_form_disturbs_nobody(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        async with register(connection, worker_info("d1")), register(connection, worker_info("d2")):
            redis_server.call("HSET", keys.worker(WorkerId("d1")), "info", '{"from":"the future"}')
            async with follow(connection, Prober(), ttl_s=60) as directory:
                assert names(directory) == ["d2/a"]


async def test_a_thousand_workers_are_one_snapshot(redis_server: RedisServer) -> None:
    infos = [worker_info(f"w{index:04}") for index in range(1_000)]
    async with connect(redis_server.url, call_timeout_s=5) as connection:
        for info in infos:
            await register(connection, replace(info), ttl_s=60)._heartbeat()
        async with follow(connection, Prober(), ttl_s=60) as directory:
            assert directory.workers() == tuple(infos)
