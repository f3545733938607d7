"""The gateway's application over a real socket, with stand-ins for everything behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from gateway.admission import AdmissionController
from gateway.app import create_app
from gateway.http_server import serve_http
from gateway.http_settings import HttpSettings
from gateway.listener import open_listener
from gateway.metrics import RequestMetrics
from gateway.model_store import ModelStore
from gateway.services import GatewayServices
from tests.fakes.pipeline import FakePipeline


@dataclass
class Gateway:
    """A running application and what is behind it."""

    port: int
    pipeline: FakePipeline
    admission: AdmissionController
    client: httpx.AsyncClient = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send_raw(
        self, path: str, body: bytes | Mapping[str, Any], *, headers: str = "content-type: application/json\r\n"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection on which one POST was written."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return reader, writer


async def until(is_so: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Let the loop turn until `is_so`."""
    async with asyncio.timeout(timeout_s):
        for _ in iter(is_so, True):
            await asyncio.sleep(0)


def make_services(
    pipeline: FakePipeline,
    models: ModelStore,
    *,
    http: HttpSettings | None = None,
    max_running: int = 1000,
    max_waiting: int = 1000,
) -> GatewayServices:
    """Services around a fake pipeline; those that no route of the HTTP interface uses are absent."""
    absent: Any = None
    return GatewayServices(
        config=absent,
        http=http or HttpSettings(),
        models=models,
        pipeline=pipeline,
        admission=AdmissionController(max_running=max_running, max_waiting=max_waiting, max_wait_s=10.0),
        metrics=RequestMetrics(CollectorRegistry(), max_model_len=256),
        directory=absent,
        journal=absent,
        ownership=absent,
    )


@asynccontextmanager
async def running_gateway(
    pipeline: FakePipeline,
    models: ModelStore,
    *,
    http: HttpSettings | None = None,
    max_running: int = 1000,
    max_waiting: int = 1000,
) -> AsyncIterator[Gateway]:
    """A gateway on a free port of the loopback."""
    services = make_services(pipeline, models, http=http, max_running=max_running, max_waiting=max_waiting)
    app = create_app(services)
    async with (
        running_app(app, http or HttpSettings()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield Gateway(port=port, pipeline=pipeline, admission=services.admission, client=client)


@asynccontextmanager
async def running_app(app: ASGIApp, http: HttpSettings) -> AsyncIterator[int]:
    """Any application under uvicorn; gives the port. The server closes its sockets before a failed test goes on."""
    listener = open_listener("127.0.0.1", 0, stall_timeout_s=http.stall_timeout_s)
    stack = AsyncExitStack()
    await stack.enter_async_context(serve_http(app, listener))
    try:
        yield listener.getsockname()[1]
    finally:
        await stack.aclose()
