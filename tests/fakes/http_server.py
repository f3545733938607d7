"""The gateway's application over a real socket, with stand-ins for everything behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from gateway.app import create_app
from gateway.http_settings import HttpSettings
from gateway.listener import open_listener
from gateway.metrics import RequestMetrics
from gateway.model_store import ModelStore
from gateway.services import GatewayServices
from tests.fakes.pipeline import FakePipeline
from weir.core.errors import OverloadedError
from weir.core.worker import WorkerInfo


class FakeAdmission:
    """Lets everybody in, or nobody; remembers who asked."""

    def __init__(self) -> None:
        self.is_full = False
        self.api_keys: list[str] = []

    def admit(self, api_key: str, *, num_prompts: int) -> Any:
        self.api_keys.append(api_key)
        if self.is_full:
            return _Refusal()
        return nullcontext()


class _Refusal:
    async def __aenter__(self) -> None:
        raise OverloadedError("too many requests wait", retry_after_s=1.2)

    async def __aexit__(self, *exc: object) -> None:
        """Never entered."""


@dataclass
class FakeDirectory:
    """The workers a test wrote down."""

    found: tuple[WorkerInfo, ...] = ()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.found


@dataclass
class Gateway:
    """A running application and what is behind it."""

    port: int
    pipeline: FakePipeline
    admission: FakeAdmission
    directory: FakeDirectory
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


def make_services(
    pipeline: FakePipeline,
    models: ModelStore,
    *,
    http: HttpSettings | None = None,
    admission: FakeAdmission | None = None,
    directory: FakeDirectory | None = None,
) -> GatewayServices:
    """Services around a fake pipeline; those that no route of the HTTP interface uses are absent."""
    absent: Any = None
    return GatewayServices(
        config=absent,
        http=http or HttpSettings(),
        models=models,
        pipeline=pipeline,
        admission=admission or FakeAdmission(),
        metrics=RequestMetrics(CollectorRegistry(), max_model_len=256),
        directory=directory or FakeDirectory(),
        journal=absent,
        ownership=absent,
    )


@asynccontextmanager
async def running_gateway(
    pipeline: FakePipeline, models: ModelStore, *, http: HttpSettings | None = None
) -> AsyncIterator[Gateway]:
    """A gateway on a free port of the loopback."""
    admission, directory = FakeAdmission(), FakeDirectory()
    app = create_app(make_services(pipeline, models, http=http, admission=admission, directory=directory))
    async with (
        running_app(app, http or HttpSettings()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield Gateway(port=port, pipeline=pipeline, admission=admission, directory=directory, client=client)


@asynccontextmanager
async def running_app(app: ASGIApp, http: HttpSettings) -> AsyncIterator[int]:
    """Any application under uvicorn; gives the port."""
    listener = open_listener("127.0.0.1", 0, stall_timeout_s=http.stall_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, access_log=False)
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
