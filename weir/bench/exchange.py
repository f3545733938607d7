"""One request over one connection, and its times. Adds as little as it can to what it measures."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise
from typing import Any, cast

import httpx

from weir.bench.answer import StreamedAnswer
from weir.bench.failure import CONNECT, PROTOCOL, TIMEOUT, UNFINISHED, ExchangeError, Failure
from weir.bench.http_response import HttpResponse
from weir.bench.record import RequestRecord
from weir.bench.request_plan import Endpoint, RequestPlan
from weir.bench.server_address import CONNECT_TIMEOUT_S, ServerAddress, refusal_of
from weir.core.deadline import Clock

MAX_COUNT = 1_000_000_000
"""Of tokens; what a server says beyond is no count."""
EVENT_STREAM = "text/event-stream"


class Exchange:
    """What happens to one planned request. Times are points on the clock.

    Args:
        awaited_chunks: `reached` is set once so many pieces of text have come, or no more will.
    """

    def __init__(self, plan: RequestPlan, *, awaited_chunks: int = 0) -> None:
        self.plan = plan
        self.answer = StreamedAnswer()
        self.failure: Failure | None = None
        self.sent_s: float | None = None
        self.ended_s: float | None = None
        self.reached = asyncio.Event()
        self._awaited_chunks = awaited_chunks

    def feed(self, body: bytes, now_s: float) -> None:
        """Take a part of the answer's body. Raises ExchangeError."""
        self.answer.feed(body, now_s)
        if len(self.answer.chunk_times_s) >= self._awaited_chunks:
            self.reached.set()

    def record(self, run: str, started_s: float, now_s: float) -> RequestRecord | None:
        """What is known at `now_s` of a run that began at `started_s`; None for a request that was never begun."""
        if self.sent_s is None and self.failure is None:
            return None
        plan, times_s, usage = self.plan, self.answer.chunk_times_s, self.answer.usage
        ended_s = now_s if self.ended_s is None else self.ended_s
        sent_s = ended_s if self.sent_s is None else self.sent_s
        details = usage.get("prompt_tokens_details")
        output_tokens = _count(usage, "completion_tokens")
        return RequestRecord(
            run=run,
            kind=plan.kind,
            index=plan.index,
            due_s=plan.due_s,
            sent_s=sent_s - started_s,
            ttft_s=times_s[0] - sent_s if times_s else None,
            itl_s=tuple(after - before for before, after in pairwise(times_s)),
            e2el_s=ended_s - sent_s,
            asked_input_tokens=plan.input_tokens,
            asked_output_tokens=plan.output_tokens,
            input_tokens=_count(usage, "prompt_tokens") or plan.input_tokens,
            output_tokens=len(times_s) if output_tokens is None else output_tokens,
            is_counted_by_server=output_tokens is not None,
            cached_tokens=_count(details, "cached_tokens") if isinstance(details, dict) else None,
            failure=self.failure,
        )


def _count(usage: dict[str, Any], name: str) -> int | None:
    """What a server counted, if it is a count at all."""
    value = usage.get(name)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


class Exchanger:
    """Performs exchanges with one server, each on a connection of its own, which is open before the clock starts."""

    def __init__(self, address: ServerAddress, endpoint: Endpoint, *, timeout_s: float, clock: Clock) -> None:
        self._url = httpx.URL(address.api + endpoint.path)
        self._head = _request_head(self._url, address)
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._timeout_s = timeout_s
        self._clock = clock

    async def perform(self, exchange: Exchange) -> None:
        """Send the request and read its answer to the end; what goes wrong is the exchange's failure."""
        exchange.failure = Failure(kind=UNFINISHED, message="running when the measurement ended")
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connect(exchange)
                try:
                    body = exchange.plan.body
                    exchange.sent_s = self._clock()
                    connection.send(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))
                    await connection.ended
                finally:
                    connection.close()
            exchange.failure = None
        except TimeoutError:
            exchange.failure = Failure(kind=TIMEOUT, message=f"no end within {self._timeout_s:g} s")
        except ExchangeError as exc:
            exchange.failure = exc.failure
        finally:
            exchange.ended_s = exchange.answer.ended_s if exchange.failure is None else self._clock()
            exchange.reached.set()

    async def _connect(self, exchange: Exchange) -> _Connection:
        host, tls = self._url.host, self._tls
        port = self._url.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(exchange, self._clock), host, port, ssl=tls
                )
        except TimeoutError as exc:
            raise ExchangeError(CONNECT, f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise ExchangeError(CONNECT, str(exc)) from exc
        return connection


class _Connection(asyncio.Protocol):
    """Stamps what comes with the time of its callback. `ended` has the result: None, or the ExchangeError."""

    def __init__(self, exchange: Exchange, clock: Clock) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exchange = exchange
        self._clock = clock
        self._response = HttpResponse()
        self._refusal = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def send(self, request: bytes) -> None:
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_s = self._clock()
        if self.ended.done():
            return
        try:
            body = self._response.feed(data)
            if self._response.status == 200:
                self._exchange.feed(body, now_s)
            else:
                self._refusal += body
            if self._response.is_complete:
                self._finish()
        except ExchangeError as exc:
            self.ended.set_exception(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        try:
            self._response.end()
            self._finish()
        except ExchangeError as error:
            self.ended.set_exception(error)

    def _finish(self) -> None:
        """The response is whole; is the answer? Raises ExchangeError."""
        status = self._response.status
        if status != 200:
            raise ExchangeError(f"http_{status}", refusal_of(self._refusal))
        kind = self._response.headers.get("content-type", EVENT_STREAM)
        if not kind.startswith(EVENT_STREAM):
            raise ExchangeError(PROTOCOL, f"the answer is {kind}, no stream of events")
        self._exchange.answer.end()
        self.ended.set_result(None)


def _request_head(url: httpx.URL, address: ServerAddress) -> bytes:
    """All of the head but the body's length."""
    fields = {
        "Host": url.netloc.decode(),
        "Content-Type": "application/json",
        "Accept": EVENT_STREAM,
        "Accept-Encoding": "identity",
        "Connection": "close",
        **address.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {url.raw_path.decode()} HTTP/1.1\r\n{lines}".encode()
