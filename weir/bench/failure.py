"""Why a request failed, by kinds that are counted."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGE_CHARS = 300

CONNECT = "connect"
DISCONNECT = "disconnect"
EMPTY = "empty"
PROTOCOL = "protocol"
STREAM_ERROR = "stream_error"
TIMEOUT = "timeout"
UNFINISHED = "unfinished"
"""Running when the measurement was interrupted; counted by itself, not as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind` is one of the above, or `http_` and the status."""

    kind: str
    message: str


class ExchangeError(Exception):
    """Ends an exchange with the server."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message[:MAX_MESSAGE_CHARS])
