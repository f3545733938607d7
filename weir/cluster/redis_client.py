"""One client of redis-py for each kind of URL, and what its errors mean.

Knows nothing of Weir's keys. Never retries: `connection.py` does, and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from weir.cluster.absent_module import without_module
from weir.core.redis_url import RedisKind, RedisUrl

# redis-py imports the metrics of OpenTelemetry's SDK where that is installed, and uses them only when told to: a fifth
# of its import time, in every process.
with without_module("opentelemetry.sdk.metrics"):
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        AuthorizationError,
        NoPermissionError,
        NoScriptError,
        RedisClusterException,
        RedisError,
        ResponseError,
    )
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError

HEALTH_CHECK_INTERVAL_S = 15.0

CLIENT_ERRORS = (RedisError, RedisClusterException, OSError, TimeoutError)
"""Everything a call can raise for reasons outside of this process. OSError includes a failed name look-up and TLS."""

# Replies of a server that is there but is not, or not yet, the one to talk to. Searched in the text, since a script's
# error is wrapped by servers before 7.0 ("ERR Error running script ... -READONLY You can't write ...").
_NOT_SERVING = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "UNBLOCKED", "NOREPLICAS", "MISCONF")

Command = tuple[Any, ...]


class RedisClient:
    """The servers behind one URL, with at most `max_connections` sockets to each.

    The caller bounds every call with `asyncio.timeout`, which closes the socket that the call was using. redis-py's
    own `socket_timeout` stays off: with it a command is sent through `asyncio.wait_for`, which before Python 3.12 may
    swallow a cancellation.
    """

    def __init__(self, url: RedisUrl, *, connect_timeout_s: float, max_connections: int) -> None:
        login: dict[str, Any] = {"username": url.username, "password": url.password}
        bounds: dict[str, Any] = {
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": None,
            "health_check_interval": HEALTH_CHECK_INTERVAL_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        self._sentinel: Sentinel | None = None
        self._client: Redis | RedisCluster
        if url.kind is RedisKind.CLUSTER:
            nodes = [ClusterNode(address.host, address.port) for address in url.addresses]
            self._client = RedisCluster(startup_nodes=nodes, max_connections=max_connections, **login, **bounds)
        elif url.kind is RedisKind.SENTINEL:
            sentinel_login: dict[str, Any] = {"username": url.sentinel_username, "password": url.sentinel_password}
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                [(address.host, address.port) for address in url.addresses],
                sentinel_kwargs={**sentinel_login, **bounds},
            )
            self._client = self._sentinel.master_for(
                url.service, db=url.db, max_connections=max_connections, **login, **bounds
            )
        else:
            where: dict[str, Any]
            if url.socket_path:
                where = {"connection_class": UnixDomainSocketConnection, "path": url.socket_path}
            else:
                where = {"host": url.addresses[0].host, "port": url.addresses[0].port}
                where["connection_class"] = SSLConnection if url.is_tls else Connection
            if url.ca_file is not None:
                where["ssl_ca_certs"] = str(url.ca_file)
            pool = BlockingConnectionPool(
                max_connections=max_connections, timeout=None, db=url.db, **where, **login, **bounds
            )
            self._client = Redis.from_pool(pool)

    async def execute(self, command: Command) -> Any:
        """The reply to one command; bytes where Redis has strings."""
        return await self._client.execute_command(*command)

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Replies in order, of one round trip to each server. A refused command's reply is its exception."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and is_link_error(reply):
                raise reply
        return replies

    async def server_version(self) -> str:
        """The version of Redis whose commands the server has (Valkey states 7.2 for its own)."""
        if isinstance(self._client, RedisCluster):
            facts = await self._client.info("server", target_nodes=RedisCluster.RANDOM)
        else:
            facts = await self._client.info("server")
        return str(facts["redis_version"])

    async def drop_idle_connections(self) -> None:
        """So that the next command asks again where the server is. (The cluster client does so by itself.)"""
        if isinstance(self._client, Redis):
            with suppress(*CLIENT_ERRORS):  # of closing a socket whose peer is gone
                await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Never fails: a socket that could not be closed in time (the client gives it a moment) is given up."""
        with suppress(*CLIENT_ERRORS):
            if isinstance(self._client, RedisCluster):
                await self._client.aclose()
            else:
                await self._client.aclose(close_connection_pool=True)
        if self._sentinel is not None:
            for sentinel in self._sentinel.sentinels:
                with suppress(*CLIENT_ERRORS):
                    await sentinel.aclose()


def is_link_error(error: BaseException) -> bool:
    """True if no server that may answer was reached, false if one answered and refused the command."""
    if isinstance(error, ResponseError):
        return any(word in str(error) for word in _NOT_SERVING)
    return isinstance(error, (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError, TimeoutError))


def is_unknown_script(error: object) -> bool:
    return isinstance(error, NoScriptError)


def is_timeout(error: BaseException) -> bool:
    return isinstance(error, (RedisTimeoutError, TimeoutError))


def is_login_error(error: BaseException) -> bool:
    """True if the URL's user or password is wrong."""
    return isinstance(error, (AuthenticationError, AuthorizationError, NoPermissionError)) or "WRONGPASS" in str(error)
