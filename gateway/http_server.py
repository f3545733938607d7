"""uvicorn inside of this process' own loop: no signal handlers, no logging set-up, ended by whoever entered it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from gateway.http_protocol import BoundedHttpProtocol

CLOSE_TIMEOUT_S = 2
"""How long what still runs at the end may take to leave; requests were drained before."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process' business (`weir.runtime.service`)."""
        yield


@asynccontextmanager
async def serve_http(app: ASGIApp, listener: socket.socket, *, keep_alive_s: int = 75) -> AsyncIterator[None]:
    """Serve `app` on a listening socket for as long as the body runs; the socket is closed at its end.

    Args:
        keep_alive_s: how long a connection without a request stays open.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([serving])
