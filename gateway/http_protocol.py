"""What comes before the body of an HTTP request, bounded in size and time: nobody has shown a key yet.

uvicorn's protocol over httptools, which has no such limits.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.error_responses import refusal_of_status

MAX_HEADER_BYTES = 64 << 10
"""Request line and headers together; what arrives with the first bytes over it is refused too."""
HEADER_TIMEOUT_S = 60.0
"""From the connection, or from the first byte of a later request, to the end of its headers."""

_TOO_LARGE = refusal_of_status(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: more than {MAX_HEADER_BYTES} bytes", closes=True
)
_TIMEOUT = refusal_of_status(
    HTTPStatus.REQUEST_TIMEOUT, f"headers: did not arrive within {HEADER_TIMEOUT_S:g} s", closes=True
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_header = True
        self._num_header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        if self._is_in_header:
            self._start_timer()
        super().data_received(data)
        if self._is_in_header and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        self._num_header_bytes = 0
        self._stop_timer()
        served: ASGIApp = self.app
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            self.app = _TOO_LARGE
        super().on_headers_complete()
        self.app = served

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_header = True
        self._num_header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(refusal_of_status(HTTPStatus.BAD_REQUEST, msg, closes=True))

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_timeout(self) -> None:
        self._header_timer = None
        if self._is_answering:  # the next request may wait until then
            self._start_timer()
        else:
            self._refuse(_TIMEOUT)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, response: Response) -> None:
        """Close, after an answer where one can be read: no application has seen a request."""
        if self._num_header_bytes and not (self._is_answering or self.transport.is_closing()):
            status = HTTPStatus(response.status_code)
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", response.body]))
        self.transport.close()
