"""The HTTP answer of a generation, whole or as an event stream.

The header leaves once every prompt was taken on: what is refused before is a 4xx or 5xx, what fails later is an event.
A client that leaves ends the work wherever it stands: in the queue, while tokenizing, in mid-stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choices import ChoiceDelta
from gateway.client_connection import find_client_gone, while_connected
from gateway.error_responses import INTERNAL_ERROR, error_object
from gateway.generation import Generation
from gateway.http_settings import HttpSettings
from gateway.rendering import Rendering, compact
from gateway.request_scope import BODY_SEND_KEY
from gateway.sse import EventStream
from weir.core.errors import WeirError, find_error

logger = logging.getLogger(__name__)

Prepare = Callable[[], Awaitable[tuple[Generation, Rendering]]]
"""Tokenizes and checks; called inside the admission permit."""


class GenerationResponse(Response):
    """Does the work of a request while it answers it.

    Args:
        permit: the admission of this request; entered before anything else.
    """

    def __init__(
        self,
        *,
        permit: AbstractAsyncContextManager[object],
        prepare: Prepare,
        settings: HttpSettings,
        is_stream: bool,
    ) -> None:
        super().__init__()
        self._permit = permit
        self._prepare = prepare
        self._settings = settings
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises WeirError only while no header has left."""
        events = EventStream(send, self._settings, send_body=scope[BODY_SEND_KEY])
        work = self._stream(events) if self._is_stream else self._answer(send)
        try:
            await while_connected(receive, work)
        except Exception as exc:
            if (gone := find_client_gone(exc)) is not None:
                logger.info("a request was dropped: %s", gone)
                return
            error = find_error(exc, WeirError)
            if not events.is_started:
                if error is None:
                    raise
                raise error from exc
            if error is None:
                logger.exception("a stream failed for a fault of this gateway")
            await self._fail(events, error or INTERNAL_ERROR)

    async def _stream(self, events: EventStream) -> None:
        async with self._permit:
            generation, rendering = await self._prepare()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(events.watch())
                await generation.run(_StreamSink(events, rendering))
                await events.end(rendering.usage_event())
                watch.cancel()

    async def _answer(self, send: Send) -> None:
        async with self._permit:
            generation, rendering = await self._prepare()
            sink = _WholeSink(generation.num_choices)
            await generation.run(sink)
            body = compact(rendering.body(sink.choices())).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, events: EventStream, error: WeirError) -> None:
        """Tell a client in mid-stream; one that takes no bytes is not waited for."""
        try:
            async with asyncio.timeout(self._settings.stall_timeout_s):
                await events.fail(error_object(error))
        except TimeoutError:
            logger.info("a client took no bytes of the error that ended its stream")


class _StreamSink:
    """Deltas as events, those of one step in one write."""

    def __init__(self, events: EventStream, rendering: Rendering) -> None:
        self._events = events
        self._rendering = rendering
        self._opened: set[int] = set()

    async def start(self) -> None:
        await self._events.start()

    async def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        text = ""
        for delta in deltas:
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                text += self._rendering.opening(delta.index)
            if not delta.is_empty:
                text += self._rendering.event(delta)
        if text:
            await self._events.send(text)


class _WholeSink:
    """Deltas kept until the end."""

    def __init__(self, num_choices: int) -> None:
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]

    async def start(self) -> None:
        """Nothing leaves before the end."""

    async def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self._deltas[delta.index].append(delta)

    def choices(self) -> list[ChoiceDelta]:
        """Each choice as one delta."""
        return [_joined(deltas) for deltas in self._deltas]


def _joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
