"""Is it up? One short question to a process on this machine; never raises."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

TIMEOUT_S = 1.0

Probe = Callable[[], Awaitable[bool]]


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


async def _ask(
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]], question: bytes
) -> bytes:
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
    """Ports of 127.0.0.1 that nobody listens on now; they stay different from each other."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
