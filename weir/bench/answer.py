"""A streamed answer of /v1/completions or /v1/chat/completions: server-sent events in, times and counts out."""

from __future__ import annotations

import json
import re
from typing import Any

from weir.bench.failure import DISCONNECT, EMPTY, PROTOCOL, STREAM_ERROR, ExchangeError

_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)": ?"(?!")')
_MORE = re.compile(rb'"(?:finish_reason|usage|error)": ?(?!null)')
"""An event with text and nothing else, as nearly all are, is known by these in a third of the time that JSON takes.

They are not found inside of a text, whose quotation marks have a backslash before them.
"""


class StreamedAnswer:
    """Reads the events of one answer. Each data line is one JSON object, as every server of this kind writes it.

    Attributes:
        chunk_times_s: when each piece of text came. A piece without text (a role, an end, half a character) is none.
        usage: the server's counts, the last that it gave.
        ended_s: when the end mark or, without one, the last choice came.
    """

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self.ended_s = 0.0
        self._is_marked = False
        self._is_finished = False
        self._rest = b""

    def feed(self, body: bytes, now_s: float) -> None:
        """Take a part of the body that came at `now_s`.

        Raises:
            ExchangeError: the server says that it failed, or says nothing that can be read.
        """
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)
            elif line.startswith(b"error:"):  # llama.cpp
                raise ExchangeError(STREAM_ERROR, line[6:].strip().decode(errors="replace"))

    def end(self) -> None:
        """The body has ended. Raises ExchangeError when the answer is not whole."""
        if not self._is_marked and not self._is_finished:
            raise ExchangeError(DISCONNECT, "the stream ended without [DONE]")
        if not self.chunk_times_s:
            raise ExchangeError(EMPTY, "the answer has no text")

    def _take(self, data: bytes, now_s: float) -> None:
        if _TEXT.search(data) and not _MORE.search(data):
            self.chunk_times_s.append(now_s)
        elif data == b"[DONE]":
            self._is_marked = True
            self.ended_s = now_s
        else:
            self._read(data, now_s)

    def _read(self, data: bytes, now_s: float) -> None:
        try:
            event = json.loads(data)
            error = event.get("error")
            choices = event.get("choices")
            usage = event.get("usage")
            choice = choices[0] if choices else None
            text = _text_of(choice) if choice else None
        except (ValueError, LookupError, AttributeError, TypeError) as exc:
            raise ExchangeError(PROTOCOL, f"not an event of a completion: {data[:100]!r}") from exc
        if error or event.get("object") == "error":
            message = error.get("message") if isinstance(error, dict) else error or event.get("message")
            raise ExchangeError(STREAM_ERROR, str(message or error))
        if isinstance(usage, dict):
            self.usage = usage
        if choice:
            self._is_finished = self._is_finished or choice.get("finish_reason") is not None
            if not self._is_marked:
                self.ended_s = now_s
            if text:
                self.chunk_times_s.append(now_s)


def _text_of(choice: dict[str, Any]) -> Any:
    text = choice.get("text")
    if text is not None:
        return text
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
