"""Laws of the prefix index, publisher and follower together, on a real server."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.cluster.samples import Cache, Events, block_hashes, connect, publish, says_yes, until, worker_info
from tests.fakes.redis_server import RedisServer
from weir.cluster import keys
from weir.cluster.connection import RedisConnection
from weir.cluster.kv_index import KvIndex
from weir.cluster.kv_publisher import PendingChanges
from weir.cluster.worker_registry import Registration, WorkerDirectory
from weir.core.worker import WorkerId, WorkerInfo

D1 = WorkerId("d1")


class ListedWorkers:
    """A directory whose list the test changes."""

    def __init__(self, infos: Sequence[WorkerInfo]) -> None:
        self.listed = list(infos)

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self.listed)


@asynccontextmanager
async def following(
    connection: RedisConnection, infos: Sequence[WorkerInfo], **bounds: int
) -> AsyncIterator[tuple[KvIndex, list[WorkerInfo]]]:
    """An index, and the list of the workers that it follows."""
    directory = ListedWorkers(infos)
    async with KvIndex(connection, directory, **bounds) as index:
        yield index, directory.listed


async def test_index_has_what_was_cached_before_and_what_changes_later(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 10)
    cache = Cache(chain[:4])
    async with connect(redis_server.url) as connection, publish(connection, cache):
        async with following(connection, [worker_info()]) as (index, _):
            await until(lambda: index.match(chain) == {D1: 4})
            cache.change(Events(stored=chain[4:]))
            await until(lambda: index.match(chain) == {D1: 10})
            cache.change(Events(removed=chain[7:]))
            await until(lambda: index.match(chain) == {D1: 7})
            cache.change(Events(cleared=True, stored=chain[:2]))
            await until(lambda: index.match(chain) == {D1: 2})
            assert index.match(block_hashes(100, 3)) == {}
            assert index.match(()) == {}
            assert index.num_loads == 1


async def test_follower_that_starts_first_is_served_too(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 3)
    async with connect(redis_server.url) as connection:
        async with following(connection, [worker_info()]) as (index, _), publish(connection, Cache(chain)):
            await until(lambda: index.match(chain) == {D1: 3})


async def test_random_changes_of_many_workers_end_in_the_same_sets(redis_server: RedisServer) -> None:
    rng = random.Random(7)
    universe = block_hashes(0, 400)
    names = ["w0", "w1", "w2"]
    caches = {name: Cache(rng.sample(universe, 50)) for name in names}
    async with connect(redis_server.url, call_timeout_s=5) as connection:
        async with (
            publish(connection, caches["w0"], "w0", max_entries=200),
            publish(connection, caches["w1"], "w1", max_entries=200),
            publish(connection, caches["w2"], "w2", max_entries=200),
            following(connection, [worker_info(name) for name in names]) as (index, _),
        ):
            for step in range(600):
                cache = caches[rng.choice(names)]
                removed = rng.sample(sorted(cache.blocks), min(len(cache.blocks), rng.randrange(6)))
                stored = [block for block in rng.sample(universe, 5) if block not in cache.blocks]
                cache.change(Events(removed=removed, stored=stored, cleared=rng.random() < 0.01))
                if step % 20 == 0:
                    await asyncio.sleep(0)

            def is_equal() -> bool:
                return all(index._map._blocks[index._map._slots[name]] == caches[name].blocks for name in names)  # type: ignore[index]

            await until(lambda: all(name in index._map._slots for name in names) and is_equal())
            index._map.check_integrity()


async def test_large_cache_is_published_and_read_in_pieces(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 5_000)
    async with connect(redis_server.url, call_timeout_s=5) as connection, publish(connection, Cache(chain)):
        async with following(connection, [worker_info()]) as (index, _):
            await until(lambda: index.match(chain) == {D1: 5_000})


async def test_gap_in_the_numbers_makes_the_follower_read_the_set_again(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 10)
    cache = Cache(chain[:2])
    async with connect(redis_server.url) as connection, publish(connection, cache) as publisher:
        async with following(connection, [worker_info()]) as (index, _):
            await until(lambda: index.match(chain) == {D1: 2})
            stream, blocks = keys.kv_stream(D1), keys.kv_blocks(D1)
            (last_id, fields), *_ = redis_server.call("XREVRANGE", stream, "+", "-", "COUNT", 1)
            generation, _, number = last_id.decode().partition("-")
            # What a follower sees that was away while the stream was trimmed: the entry between is not there.
            redis_server.call("SADD", blocks, *chain[2:6])
            redis_server.call(
                "XADD", stream, f"{generation}-{int(number) + 2}", "i", "a", "b", fields[b"b"], "s", chain[5]
            )
            await until(lambda: index.match(chain) == {D1: 6})
            assert index.num_loads == 2
            # The publisher sees that somebody else has written, and starts over from its cache.
            cache.change(Events(stored=chain[2:3]))
            await until(lambda: index.match(chain) == {D1: 3})
            assert publisher.num_resets == 2


async def test_both_sides_survive_a_redis_that_comes_back_empty(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 10)
    cache = Cache(chain[:4])
    async with connect(redis_server.url) as worker, connect(redis_server.url) as gateway:
        async with publish(worker, cache), following(gateway, [worker_info()]) as (index, _):
            await until(lambda: index.match(chain) == {D1: 4})
            await asyncio.to_thread(redis_server.kill)
            await until(lambda: not gateway.is_up)
            cache.change(Events(stored=chain[4:8]))
            assert index.match(chain) == {D1: 4}
            await asyncio.to_thread(redis_server.start)
            await until(lambda: index.match(chain) == {D1: 8})
            redis_server.call("FLUSHALL")
            await until(lambda: redis_server.call("SCARD", keys.kv_blocks(D1)) == 8)
            cache.change(Events(removed=chain[1:8]))
            await until(lambda: index.match(chain) == {D1: 1})


async def test_more_changes_than_memory_while_redis_is_away_become_a_snapshot(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 1_000)
    cache = Cache()
    async with connect(redis_server.url) as connection, publish(connection, cache, max_pending_hashes=10) as publisher:
        await until(lambda: publisher.num_resets == 1)
        cache.change(Events(stored=chain))
        async with following(connection, [worker_info()]) as (index, _):
            await until(lambda: index.match(chain) == {D1: 1_000})
        assert publisher.num_resets == 2


async def test_worker_that_leaves_or_restarts_takes_its_blocks_with_it(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 4)
    async with connect(redis_server.url) as connection:
        async with publish(connection, Cache(chain)), publish(connection, Cache(chain[:2]), "d2"):
            async with following(connection, [worker_info("d1"), worker_info("d2")]) as (index, listed):
                await until(lambda: index.match(chain) == {D1: 4, "d2": 2})
                listed.remove(worker_info("d2"))
                await until(lambda: index.match(chain) == {D1: 4})
                listed[:] = [worker_info("d1", "b")]
                await until(lambda: index.match(chain) == {})
                async with publish(connection, Cache(chain[:1]), "d1", "b"):
                    await until(lambda: index.match(chain) == {D1: 1})


async def test_earlier_incarnation_stops_publishing_when_a_later_one_does(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 6)
    earlier_cache, later_cache = Cache(chain[:1]), Cache(chain[:2])
    async with connect(redis_server.url) as connection, publish(connection, earlier_cache, "d1", "a") as earlier:
        await until(lambda: earlier.num_resets == 1)
        async with publish(connection, later_cache, "d1", "b") as later:
            async with following(connection, [worker_info("d1", "b")]) as (index, _):
                await until(lambda: index.match(chain) == {D1: 2})
                earlier_cache.change(Events(stored=chain[1:]))
                later_cache.change(Events(stored=chain[2:3]))
                await until(lambda: index.match(chain) == {D1: 3})
                await until(lambda: earlier._is_current is False)
                assert (earlier.num_resets, later.num_resets) == (1, 1)


async def test_index_of_an_idle_worker_is_kept_alive(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 2)
    async with connect(redis_server.url) as connection, publish(connection, Cache(chain), ttl_s=3.0) as publisher:
        await until(lambda: 0 < redis_server.call("PTTL", keys.kv_blocks(D1)) < 2_500)
        await until(lambda: redis_server.call("PTTL", keys.kv_blocks(D1)) > 2_700)
        assert redis_server.call("PTTL", keys.kv_stream(D1)) > 2_500
        assert publisher.num_resets == 1


async def test_index_follows_a_real_directory(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 2)
    async with connect(redis_server.url) as connection:
        async with WorkerDirectory(connection, probe=says_yes, ttl_s=60) as directory:
            async with KvIndex(connection, directory) as index, publish(connection, Cache(chain)):
                async with Registration(connection, worker_info, ttl_s=60):
                    await until(lambda: index.match(chain) == {D1: 2})
                await until(lambda: index.match(chain) == {})


async def test_index_is_bounded(redis_server: RedisServer) -> None:
    chain = block_hashes(0, 100)
    async with connect(redis_server.url) as connection, publish(connection, Cache(chain)):
        async with following(connection, [worker_info()], max_entries=30) as (index, _):
            await until(lambda: index.num_blocks(D1) == 30)
            await until(lambda: index.num_untracked >= 70)


def test_pending_changes_keep_the_last_word_on_each_block() -> None:
    a, b, c = block_hashes(0, 3)
    pending = PendingChanges(max_hashes=10)
    pending.add(Events(stored=(a, b)))
    pending.add(Events(removed=(a,)))
    pending.add(Events(removed=(c,), stored=(c,)))
    entry = pending.take(10)
    assert (entry.is_cleared, set(entry.stored), entry.removed) == (False, {b, c}, (a,))
    assert not pending
    pending.add(Events(stored=(a,)))
    pending.add(Events(cleared=True, stored=(b,)))
    entry = pending.take(10)
    assert (entry.is_cleared, entry.stored, entry.removed) == (True, (b,), ())


def test_pending_changes_are_sent_in_pieces_and_bounded() -> None:
    pending = PendingChanges(max_hashes=10)
    pending.add(Events(cleared=True, stored=block_hashes(0, 9)))
    first, second = pending.take(5), pending.take(5)
    assert (first.is_cleared, len(first.stored)) == (True, 5)
    assert (second.is_cleared, len(second.stored)) == (False, 4)
    pending.add(Events(stored=block_hashes(0, 11)))
    assert pending.has_overflowed
    assert not pending
