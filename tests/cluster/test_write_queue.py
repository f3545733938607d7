"""Laws of the queue of writes, on a real server."""

import asyncio
import time

import pytest

from tests.cluster.samples import connect, until
from tests.fakes.redis_server import RedisServer
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.scripts import Script
from weir.cluster.write_queue import WriteQueue

# KEYS: text. ARGV: number. Writes it if it is greater than what is there.
RAISE = Script("""
if tonumber(redis.call('GET', KEYS[1]) or '-1') >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', 60000)
return 1
""")


def number_queue(connection: RedisConnection, **bounds: int) -> WriteQueue[tuple[str, int]]:
    def encode(value: tuple[str, int]) -> tuple[ScriptCall, ...]:
        name, number = value
        return (ScriptCall(script=RAISE, keys=(name,), args=(number,)),)

    return WriteQueue(connection, encode, should_replace=lambda pending, new: new[1] > pending[1], **bounds)


async def test_writes_arrive_and_are_counted(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, number_queue(connection) as queue:
        for index in range(1_000):
            queue.put(f"k{index}", (f"k{index}", 1))
        await queue.wait_until_sent()
        assert queue.stats.num_written == 1_000
        queue.put("k0", ("k0", 1))
        await queue.wait_until_sent()
        assert (queue.stats.num_stale, queue.stats.num_pending) == (1, 0)
    assert redis_server.call("DBSIZE") >= 1_000


async def test_of_one_key_only_the_newest_is_sent(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, number_queue(connection) as queue:
        for number in range(100):
            queue.put("k", ("k", number))
        queue.put("k", ("k", 50))
        await queue.wait_until_sent()
        assert queue.stats.num_written == 1
    assert redis_server.call("GET", "k") == b"99"


async def test_queue_is_bounded_while_redis_is_away_and_drops_the_oldest(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, number_queue(connection, max_pending=10) as queue:
        redis_server.kill()
        await until(lambda: not connection.is_up)
        started_s = time.monotonic()
        for index in range(25):
            queue.put(f"k{index}", (f"k{index}", 1))
        assert time.monotonic() - started_s < 0.4
        assert queue.stats.num_pending == 10
        assert queue.stats.num_dropped == 15
        redis_server.start()
        async with asyncio.timeout(5):
            await queue.wait_until_sent()
    with redis_server.client() as client:
        assert set(client.keys("k*")) == {f"k{index}".encode() for index in range(15, 25)}


async def test_writes_in_flight_when_redis_dies_are_sent_again(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, number_queue(connection) as queue:
        redis_server.stop()
        for index in range(300):
            queue.put(f"k{index}", (f"k{index}", 1))
        await until(lambda: not connection.is_up)
        queue.put("k0", ("k0", 2))
        redis_server.resume()
        async with asyncio.timeout(5):
            await queue.wait_until_sent()
        assert queue.stats.num_pending == 0
        with redis_server.client() as client:
            assert client.get("k0") == b"2"
            assert len(client.keys("k*")) == 300


async def test_write_that_redis_refuses_is_counted_and_not_repeated(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, number_queue(connection) as queue:
        redis_server.call("HSET", "bad", "a", "b")
        redis_server.call("PEXPIRE", "bad", 60_000)
        queue.put("bad", ("bad", 1))
        queue.put("good", ("good", 1))
        await queue.wait_until_sent()
        assert (queue.stats.num_refused, queue.stats.num_written) == (1, 1)


async def test_leaving_sends_what_is_pending(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        async with number_queue(connection) as queue:
            queue.put("k", ("k", 7))
    assert redis_server.call("GET", "k") == b"7"


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_leaving_without_redis_is_fast(redis_server: RedisServer, fault: str) -> None:
    async with connect(redis_server.url) as connection:
        async with number_queue(connection) as queue:
            getattr(redis_server, fault)()
            queue.put("k", ("k", 7))
            started_s = time.monotonic()
        assert time.monotonic() - started_s < 5.0
