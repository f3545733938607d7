"""What the whole floor does when Redis fails over, pauses, dies, or is a cluster."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from tests.cluster.samples import Cache, Events, block_hashes, connect, publish, says_yes, until, worker_info
from tests.fakes.redis_server import RedisServer, redis_binary
from weir.cluster import keys
from weir.cluster.block_ownership import BlockGroup, BlockOwnership, OwnershipRecorder
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.kv_index import KvIndex
from weir.cluster.request_journal import RequestJournal, RequestRecord, RequestState
from weir.cluster.scripts import Script
from weir.cluster.worker_registry import Registration, WorkerDirectory
from weir.core.deadline import Deadline
from weir.core.errors import UnavailableError
from weir.core.request import HandoffId, HandoffKey, RequestId
from weir.core.worker import Incarnation, WorkerId

_Answer = TypeVar("_Answer")

D1 = WorkerId("d1")
KEY = HandoffKey(HandoffId("h1"), 0)
CHAIN = block_hashes(0, 6)
WRITE = Script("""
redis.call('SET', KEYS[1], ARGV[1], 'PX', 60000)
return ARGV[1]
""")


class Everything:
    """One worker and one gateway, each with its own link, and all that they keep in Redis."""

    def __init__(self, worker: RedisConnection, gateway: RedisConnection, ttl_s: float) -> None:
        self.worker, self.gateway = worker, gateway
        self.cache = Cache(CHAIN[:2])
        self.directory = WorkerDirectory(gateway, probe=says_yes, ttl_s=ttl_s)
        self.index = KvIndex(gateway, self.directory)
        self.journal = RequestJournal(gateway)
        self.ownership = BlockOwnership(gateway)
        self.recorder = OwnershipRecorder(worker, D1, Incarnation("a"))
        self._num_checks = 0

    async def check(self, timeout_s: float = 10.0) -> None:
        """Writes something of each kind and reads it back through the other link."""
        self._num_checks += 1
        request_id = RequestId(f"request-{self._num_checks}")
        async with asyncio.timeout(timeout_s):
            self.journal.record(RequestRecord(request_id=request_id, owner="g1", state=RequestState.DECODING))
            groups = (BlockGroup(first_block=0, num_blocks=2),)
            self.recorder.record_destination(request_id, KEY, groups, Deadline.after(30))
            self.cache.change(Events(removed=CHAIN[2:], stored=CHAIN[2 : 3 + self._num_checks % 3]))
            await self.journal.wait_until_sent()
            await self.recorder.wait_until_sent()
            record = await self._ask(lambda: self.journal.get(request_id))
            assert record is not None
            assert record.state is RequestState.DECODING
            assert len(await self._ask(lambda: self.ownership.by_request(request_id))) == 1
            held = await self._ask(lambda: self.ownership.by_worker(D1))
            assert request_id in {holding.request_id for holding in held}
            await until(lambda: self.index.match(CHAIN) == {D1: 3 + self._num_checks % 3})
            assert [info.worker_id for info in self.directory.workers()] == [D1]

    async def _ask(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """A client that comes again when it is told 503."""
        while True:
            try:
                return await question()
            except UnavailableError:
                await self.gateway.link.wait_until_up()


@asynccontextmanager
async def everything(url: str, *, ttl_s: float = 0.5) -> AsyncIterator[Everything]:
    async with connect(url) as worker, connect(url) as gateway:
        whole = Everything(worker, gateway, ttl_s)
        async with Registration(worker, worker_info, ttl_s=ttl_s), whole.directory, whole.index:
            async with whole.journal, whole.recorder, publish(worker, whole.cache):
                yield whole


async def test_every_key_expires_and_has_the_prefix(redis_server: RedisServer) -> None:
    async with everything(redis_server.url, ttl_s=60) as whole:
        await whole.check()
        found = redis_server.assert_every_key_expires()
        assert all(key.startswith("weir:1:") for key in found)
        kinds = ("link", "{workers}:worker", "{workers}:index", "{workers}:changes", "request", "ownership", "held")
        for kind in (*kinds, "{kv}:blocks", "{kv}:stream"):
            assert any(key.startswith(f"weir:1:{kind}") for key in found), kind
    redis_server.assert_every_key_expires()


async def test_killed_redis_that_comes_back_empty_is_filled_again(redis_server: RedisServer) -> None:
    async with everything(redis_server.url) as whole:
        await whole.check()
        for _ in range(2):
            await asyncio.to_thread(redis_server.restart_empty)
            await whole.check()
        redis_server.assert_every_key_expires()


async def test_redis_away_for_a_while_changes_nothing_that_is_known(redis_server: RedisServer) -> None:
    async with everything(redis_server.url) as whole:
        await whole.check()
        matched = whole.index.match(CHAIN)
        await asyncio.to_thread(redis_server.kill)
        await until(lambda: not whole.gateway.is_up)
        with pytest.raises(UnavailableError):
            await whole.journal.get(RequestId("request-1"))
        assert whole.index.match(CHAIN) == matched
        assert len(whole.directory.workers()) == 1
        await asyncio.to_thread(redis_server.start)
        await whole.check()


async def test_paused_redis_delays_and_loses_nothing(redis_server: RedisServer) -> None:
    async with everything(redis_server.url) as whole:
        await whole.check()
        redis_server.call("CLIENT", "PAUSE", 1_500, "ALL")
        await whole.check()


async def test_hanging_redis_delays_and_loses_nothing(redis_server: RedisServer) -> None:
    async with everything(redis_server.url) as whole:
        await whole.check()
        redis_server.stop()
        await until(lambda: not whole.gateway.is_up and not whole.worker.is_up)
        redis_server.resume()
        await whole.check()


@pytest.mark.full
@pytest.mark.parametrize("fault", ["pause 5 s", "stop 10 s", "restart empty after 10 s"])
async def test_long_faults_of_redis_delay_and_lose_nothing(redis_server: RedisServer, fault: str) -> None:
    """S38 at its own length, under 20 calls a second."""
    async with everything(redis_server.url) as whole:
        await whole.check()
        ended = asyncio.get_running_loop().time() + (5 if "pause" in fault else 10)
        if "pause" in fault:
            redis_server.call("CLIENT", "PAUSE", 5_000, "ALL")
        elif "stop" in fault:
            redis_server.stop()
        else:
            redis_server.kill()
        num_refused = 0
        while asyncio.get_running_loop().time() < ended:
            asked_s = time.monotonic()
            try:
                await whole.journal.get(RequestId("request-1"))
            except UnavailableError:
                num_refused += 1
            assert time.monotonic() - asked_s < 3.0
            whole.journal.record(RequestRecord(request_id=RequestId("x"), owner="g1", state=RequestState.DONE))
            await asyncio.sleep(0.05)
        assert num_refused > 50
        if "stop" in fault:
            redis_server.resume()
        elif "restart" in fault:
            await asyncio.to_thread(redis_server.start)
        await whole.check()


@pytest.mark.skipif(redis_binary() is None, reason="redis-server is not installed")
async def test_redis_itself_serves_as_well_as_valkey() -> None:
    with RedisServer(binary=redis_binary()) as server:
        async with everything(server.url) as whole:
            await whole.check()
            await asyncio.to_thread(server.restart_empty)
            await whole.check()


async def test_demoted_server_is_given_up_and_used_again_once_promoted(
    redis_pair: tuple[RedisServer, RedisServer],
) -> None:
    """S38: roles switch under load without a connection closed; there is no other address to go to but this one."""
    primary, other = redis_pair
    async with connect(primary.url) as connection:
        is_over = asyncio.Event()
        errors: list[str] = []
        longest_s = 0.0

        async def write(index: int) -> None:
            nonlocal longest_s
            while not is_over.is_set():
                started_s = time.monotonic()
                try:
                    await connection.run_script(WRITE, [f"k{index}"], ["x"])
                except UnavailableError as exc:
                    errors.append(exc.message)
                    await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - started_s)

        async with asyncio.TaskGroup() as group:
            for index in range(20):
                group.create_task(write(index))
            await until(lambda: primary.call("EXISTS", "k19"))
            other.promote()
            primary.replicate(other)
            await until(lambda: not connection.is_up)
            primary.promote()
            async with asyncio.timeout(5):
                await connection.link.wait_until_up()
            is_over.set()
        assert errors
        assert longest_s < 3.0
        assert await connection.run_script(WRITE, ["k"], ["y"]) == b"y"


async def test_sentinel_failover_with_the_old_primary_left_as_a_replica_recovers(
    redis_sentinel: tuple[RedisServer, RedisServer, RedisServer],
) -> None:
    """S38 as it was reported: the old primary stays up, its connections stay open, writes to it say READONLY."""
    sentinel, old, new = redis_sentinel
    async with everything(f"redis+sentinel://127.0.0.1:{sentinel.port}/weir") as whole:
        await whole.check()
        sentinel.call("SENTINEL", "FAILOVER", "weir")
        await until(lambda: new.call("ROLE")[0] == b"master" and old.call("ROLE")[0] == b"slave")
        await whole.check()
        assert new.call("EXISTS", keys.request(RequestId("request-2"))) == 1
        new.assert_every_key_expires()


async def test_sentinel_failover_after_the_primary_died_recovers(
    redis_sentinel: tuple[RedisServer, RedisServer, RedisServer],
) -> None:
    sentinel, old, new = redis_sentinel
    async with everything(f"redis+sentinel://127.0.0.1:{sentinel.port}/weir") as whole:
        await whole.check()
        old.kill()
        await until(lambda: new.call("ROLE")[0] == b"master")
        await whole.check()


async def test_everything_works_on_a_cluster(redis_cluster: tuple[RedisServer, ...]) -> None:
    nodes = ",".join(f"127.0.0.1:{server.port}" for server in redis_cluster[:2])
    async with everything(f"redis+cluster://{nodes}") as whole:
        for _ in range(5):
            await whole.check()
        calls = [ScriptCall(script=WRITE, keys=(f"k{index}",), args=(index,)) for index in range(100)]
        assert await whole.gateway.run_scripts(calls) == [str(index).encode() for index in range(100)]
    assert all(server.call("DBSIZE") for server in redis_cluster)
    for server in redis_cluster:
        server.assert_every_key_expires()


async def test_cluster_without_one_of_its_nodes_is_away_and_comes_back(redis_cluster: tuple[RedisServer, ...]) -> None:
    url = f"redis+cluster://127.0.0.1:{redis_cluster[0].port}"
    async with connect(url) as connection:
        calls = [ScriptCall(script=WRITE, keys=(f"k{index}",), args=(index,)) for index in range(30)]
        await connection.run_scripts(calls)
        redis_cluster[2].kill()
        with pytest.raises(UnavailableError):
            await connection.run_scripts(calls)
        await asyncio.to_thread(redis_cluster[2].start)
        async with asyncio.timeout(20):
            while True:
                await connection.link.wait_until_up()
                try:
                    await connection.run_scripts(calls)
                    break
                except UnavailableError:
                    await asyncio.sleep(0.02)
