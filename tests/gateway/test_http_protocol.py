"""What may come before a body is bounded, for clients that have shown no key."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from gateway import http_protocol
from gateway.http_protocol import MAX_HEADER_BYTES
from gateway.http_settings import HttpSettings
from tests.fakes.http_server import running_app

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    await PlainTextResponse("hello")(scope, receive, send)


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with running_app(greet, HttpSettings()) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of the last answer of a connection."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("num_bytes", [MAX_HEADER_BYTES, 100 << 10])
async def test_headers_over_the_limit_are_refused(num_bytes: int) -> None:
    async with connection() as (reader, writer):
        writer.write(HEAD + b"a: " + b"x" * num_bytes + b"\r\n\r\n")
        assert await refusal(reader) == (431, "request_header_fields_too_large")


async def test_a_header_without_an_end_is_refused() -> None:
    async with connection() as (reader, writer):
        writer.write(HEAD + b"a: " + b"x" * (MAX_HEADER_BYTES + 1))
        assert await refusal(reader) == (431, "request_header_fields_too_large")


async def test_a_flood_of_headers_is_cut_off() -> None:
    async with connection() as (reader, writer):
        writer.write(HEAD + b"a: " + b"x" * (32 << 20))
        with contextlib.suppress(ConnectionError):  # what is not read any more resets it
            assert (await refusal(reader))[0] == 431


async def test_headers_below_the_limit_and_bodies_above_it_are_served() -> None:
    large = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000
    async with connection() as (reader, writer):
        for request in (HEAD + b"a: " + b"x" * (60 << 10) + b"\r\n\r\n", large, large + HEAD + b"\r\n"):
            writer.write(request)
            assert b"200 OK" in await reader.readuntil(b"hello")
        assert b"200 OK" in await reader.readuntil(b"hello")


@pytest.mark.parametrize("sent", [b"G", HEAD])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_headers_that_do_not_come_in_time_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_before: int, sent: bytes
) -> None:
    async with connection() as (reader, writer):
        for _ in range(num_before):
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"hello")
        monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.2)
        writer.write(sent)
        assert await refusal(reader) == (408, "request_timeout")


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.2)
    async with connection() as (reader, _):
        assert await reader.read() == b""


async def test_bytes_behind_a_request_do_not_disturb_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.05)
    async with connection() as (reader, writer):
        writer.write(HEAD.replace(b"GET /", b"GET /slow") + b"\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"\r\nGET")
        assert b"200 OK" in await reader.readuntil(b"hello")
        assert await refusal(reader) == (408, "request_timeout")


async def test_what_is_no_http_is_refused_in_the_shape_of_every_error() -> None:
    async with connection() as (reader, writer):
        writer.write(b"hello?\r\n\r\n")
        assert await refusal(reader) == (400, "bad_request")
