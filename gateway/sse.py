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

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

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

    Attributes:
        is_started: whether the header has left; from then on a failure can only be an event.
    """

    def __init__(self, send: Send, settings: HttpSettings) -> None:
        self._send = send
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

    async def send(self, events: str) -> None:
        """Send whole events, ASCII; waits while the client is slow."""
        await self._write(events.encode("ascii"))

    async def end(self, events: str = "") -> None:
        """Send the last events, say that the answer is whole, and close."""
        await self._write(events.encode("ascii") + DONE, is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Send an error object as the last event, and close without saying that the answer is whole."""
        await self._write(encode_event(error).encode("ascii"), is_last=True)

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
                due_s = min(due_s, now + self._keep_alive_s)
            else:
                due_s = self._last_sent_s + self._keep_alive_s
                if now >= due_s and self.is_started:
                    await self._send_keep_alive()
                    continue
            await asyncio.sleep(max(0.001, due_s - now))

    async def _send_keep_alive(self) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._write(KEEP_ALIVE)
        except TimeoutError as exc:
            raise ClientGoneError(f"the client let a write wait for {self._stall_timeout_s:g} s") from exc

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        """One message of whole events: writes of several prompts may wait side by side, but never mix."""
        if self._num_waiting == 0:
            self._waiting_since_s = self._clock()
        self._num_waiting += 1
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        finally:
            self._num_waiting -= 1
        self._last_sent_s = self._clock()
