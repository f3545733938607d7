"""Server-sent events to one client, over plain ASGI messages.

One call of `send` a step carries the events of all choices. A silent stream gets comment lines, so that proxies keep it
open; a client that takes no bytes is dropped after a while, and until then holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.types import Send

from gateway.client_connection import ClientGoneError
from gateway.http_settings import HttpSettings

KEEP_ALIVE = ": keep-alive\n\n"
DONE = "data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def encode_event(value: Any) -> str:
    """One event whose data is `value` as one line of ASCII JSON."""
    return f"data: {json.dumps(value, allow_nan=False, separators=(',', ':'))}\n\n"


class EventStream:
    """The answer to one request as an event stream.

    Args:
        send: takes the header.
        send_body: takes all that follows; the same, or a shorter way.

    Attributes:
        is_started: whether the header has left; from then on a failure can only be an event.
    """

    def __init__(self, send: Send, settings: HttpSettings, *, send_body: Send | None = None) -> None:
        self._send = send
        self._send_body = send_body or send
        self._keep_alive_s = settings.keep_alive_s
        self._stall_timeout_s = settings.stall_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._last_sent_s = 0.0
        self._num_waiting = 0
        self._waiting_since_s = 0.0
        self.is_started = False

    async def start(self) -> None:
        """Send the header."""
        self.is_started = True
        self._last_sent_s = self._clock()
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def send(self, events: str, *, is_last: bool = False) -> None:
        """Send whole events, ASCII, in one message; waits while the client is slow.

        Messages of several prompts may wait side by side; they never mix.
        """
        if self._num_waiting == 0:
            self._waiting_since_s = self._clock()
        self._num_waiting += 1
        try:
            await self._send_body(
                {"type": "http.response.body", "body": events.encode("ascii"), "more_body": not is_last}
            )
        finally:
            self._num_waiting -= 1
        self._last_sent_s = self._clock()

    async def end(self, events: str = "") -> None:
        """Send the last events, say that the answer is whole, and close."""
        await self.send(events + DONE, is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Send an error object as the last event, and close without saying that the answer is whole."""
        await self.send(encode_event(error), is_last=True)

    async def watch(self) -> NoReturn:
        """Send comment lines while nothing else is sent.

        Raises:
            ClientGoneError: the client let a write wait for `stall_timeout_s`.
        """
        while True:
            now = self._clock()
            if self._num_waiting:
                due_s = self._waiting_since_s + self._stall_timeout_s
                if now >= due_s:
                    raise ClientGoneError(f"the client let a write wait for {self._stall_timeout_s:g} s")
            else:
                due_s = (self._last_sent_s if self.is_started else now) + self._keep_alive_s
                if now >= due_s:
                    await self._send_keep_alive()
                    continue
            await asyncio.sleep(min(due_s - now, self._stall_timeout_s))

    async def _send_keep_alive(self) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self.send(KEEP_ALIVE)
        except TimeoutError as exc:
            raise ClientGoneError(f"the client let a write wait for {self._stall_timeout_s:g} s") from exc
