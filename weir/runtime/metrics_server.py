"""Plain HTTP of a worker, for what watches it: /metrics, /health (alive) and /ready (takes work)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from weir.runtime.ports import cannot_listen

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a process is alive, whether it takes work, and one line why not."""

    is_live: bool
    is_ready: bool
    detail: str = ""


@asynccontextmanager
async def start_metrics_server(
    registry: CollectorRegistry, host: str, port: int, health: Callable[[], Health]
) -> AsyncIterator[int]:
    """Serve until the block ends; gives the real port, for `port` 0.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    endpoint = _Endpoint(registry, health)
    try:
        server = await asyncio.start_server(endpoint.serve, host, port, limit=MAX_REQUEST_BYTES)
    except OSError as exc:
        raise cannot_listen("metrics_port", f"{host}:{port}", exc) from exc
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class _Endpoint:
    def __init__(self, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._registry = registry
        self._health = health

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            logger.debug("metrics client left: %r", exc)
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"use GET\n")
        if path == b"/metrics":
            return _response("200 OK", generate_latest(self._registry), CONTENT_TYPE_LATEST)
        if path in (b"/health", b"/ready"):
            health = self._health()
            is_good = health.is_live if path == b"/health" else health.is_ready
            status = "200 OK" if is_good else "503 Service Unavailable"
            return _response(status, (health.detail or ("ok" if is_good else "not ready")).encode() + b"\n")
        return _response("404 Not Found", b"there are /metrics, /health and /ready\n")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
