from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from weir.cli.probes import free_ports, http_probe, redis_probe


async def _answer(answer: bytes) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("answer", "is_ready"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", True), (b"HTTP/1.1 503 Wait\r\n\r\n", False), (b"nonsense\n", False), (b"", False)],
)
async def test_http_is_ready_with_a_200(answer: bytes, is_ready: bool) -> None:
    async with await _answer(answer) as server:
        port = server.sockets[0].getsockname()[1]
        assert await http_probe("127.0.0.1", port)() is is_ready


async def test_a_key_is_sent_where_one_is_asked_for() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        assert await http_probe("127.0.0.1", server.sockets[0].getsockname()[1], "k-1")()
    assert b"Authorization: Bearer k-1" in seen


async def test_nobody_there_is_not_ready() -> None:
    (port,) = free_ports(1)
    assert not await http_probe("127.0.0.1", port)()
    assert not await redis_probe(Path("/nowhere/redis.sock"))()


async def test_redis_is_ready_when_it_answers_a_ping() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+PONG\r\n" if await reader.readline() == b"PING\r\n" else b"-ERR\r\n")
        writer.close()

    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        path = Path(directory) / "redis.sock"
        async with await asyncio.start_unix_server(serve, path):
            assert await redis_probe(path)()


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
