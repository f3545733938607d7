"""Completions over HTTP as a client sees them, each in a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

TIMEOUT_S = 60.0


class HttpStream(threading.Thread):
    """One streamed completion. Joins when the stream has ended, however."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {"temperature": 0, "ignore_eos": True, "stream": True} | body
        self.status = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_complete = False
        self.ended_s = 0.0
        self.has_text = threading.Event()
        self.must_leave = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=TIMEOUT_S) as response:
                self.status = response.status_code
                if response.status_code != 200:
                    self.error = json.loads(response.read())["error"]
                    return
                for line in response.iter_lines():
                    if self.must_leave.is_set():
                        return
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = {"message": f"the connection broke: {error!r}"}
        finally:
            self.ended_s = time.monotonic()
            self.has_text.set()

    def finish(self, timeout_s: float = TIMEOUT_S) -> HttpStream:
        """Itself, once it has ended. Raises AssertionError if it hangs."""
        self.join(timeout_s)
        assert not self.is_alive(), f"a stream hangs after {len(self.text)} characters"
        return self

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["text"]:
                self.has_text.set()


def complete(url: str, **body: Any) -> str:
    """The text of a completion that must succeed."""
    stream = HttpStream(url, **body).finish()
    assert stream.error is None, stream.error
    assert stream.is_complete
    return stream.text
