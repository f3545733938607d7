"""Is it up? One short question to a process; also which ports are free."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from weir.core.errors import ConfigError
from weir.core.redis_url import RedisUrl

TIMEOUT_S = 1.0
_UNASSIGNED_PORTS = range(20_000, 32_768)

Probe = Callable[[], Awaitable[bool]]
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def http_probe(host: str, port: int, api_key: str | None = None) -> Probe:
    """Whether `GET /ready` answers 200."""
    headers = ["GET /ready HTTP/1.1", f"Host: {host}", "Connection: close"]
    if api_key is not None:
        headers.append(f"Authorization: Bearer {api_key}")
    request = "\r\n".join((*headers, "", "")).encode()

    async def probe() -> bool:
        return (await _ask(lambda: asyncio.open_connection(host, port), request)).split(b" ")[1:2] == [b"200"]

    return probe


def redis_probe(socket_path: Path) -> Probe:
    """Whether a Redis answers on a Unix socket."""

    async def probe() -> bool:
        return (await _ask(lambda: asyncio.open_unix_connection(socket_path), b"PING\r\n")).startswith(b"+PONG")

    return probe


async def check_redis_answers(url: str) -> None:
    """Raises ConfigError for a URL that is none, and when nobody listens at any of its addresses."""
    parsed = RedisUrl.parse(url)
    connects: dict[str, Connect] = {
        f"{address.host}:{address.port}": partial(asyncio.open_connection, address.host, address.port)
        for address in parsed.addresses
    } or {parsed.socket_path: partial(asyncio.open_unix_connection, parsed.socket_path)}
    reasons = [await _refusal(connect) for connect in connects.values()]
    if all(reasons):
        raise ConfigError(f"redis: nobody answers at {', '.join(connects)}: {reasons[0]}", param="redis")


async def _refusal(connect: Connect) -> str:
    """Why there is no connection; empty for one that there is."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await connect()
    except TimeoutError:
        return f"no answer within {TIMEOUT_S:g} s"
    except OSError as exc:
        return str(exc)
    writer.close()
    return ""


async def _ask(connect: Connect, question: bytes) -> bytes:
    """The first line of the answer, empty for none."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await connect()
            try:
                writer.write(question)
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return b""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different.

    They lie below those of outgoing connections, one of which could take a port before its owner does.
    """
    ports: list[int] = []
    for port in random.sample(_UNASSIGNED_PORTS, len(_UNASSIGNED_PORTS)):
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ConfigError(f"only {len(ports)} of {count} ports are free", param="port")
