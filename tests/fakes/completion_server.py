"""A server of OpenAI's interface whose answers a test writes byte by byte, over a real socket.

It knows the questions that `weir bench` asks before it measures: models, version, tokenize and detokenize.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.fakes.tiny_tokenizer import byte_level

MODEL = "scripted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and the way back to its client."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    def start(self, *, status: int = 200, content_type: str = "text/event-stream") -> None:
        """The head of a chunked answer."""
        self.send(
            f"HTTP/1.1 {status} Whatever\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )

    def send_chunk(self, body: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(body), body))

    def send_event(self, event: Any) -> None:
        self.send_chunk(f"data: {json.dumps(event)}\n\n".encode())

    def send_text(self, text: str, finish_reason: str | None = None) -> None:
        """A piece of a completion or, if that was asked for, of a chat."""
        said = {"delta": {"content": text}} if "messages" in self.body else {"text": text}
        self.send_event({"choices": [{"index": 0, **said, "finish_reason": finish_reason}]})

    def end(self, *, completion_tokens: int | None = None) -> None:
        """Usage, if there is a count, the end mark and the end of the body."""
        if completion_tokens is not None:
            usage = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": completion_tokens}
            self.send_event({"choices": [], "usage": usage})
        self.send_chunk(b"data: [DONE]\n\n")
        self.send(b"0\r\n\r\n")

    def send_json(self, answer: Any, *, status: int = 200) -> None:
        raw = json.dumps(answer).encode()
        self.send(f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.body.get("prompt") or self.body["messages"][0]["content"]
        return len(byte_level().encode(prompt).ids) if isinstance(prompt, str) else len(prompt)


Answer = Callable[[Call], Awaitable[None]]


async def answer_in_full(call: Call) -> None:
    """As many pieces of text as tokens were asked for, and usage."""
    num_tokens: int = call.body["max_tokens"]
    call.start()
    for index in range(num_tokens):
        call.send_text(f" {index}", finish_reason="length" if index + 1 == num_tokens else None)
    call.end(completion_tokens=num_tokens)


class CompletionServer:
    """Calls `answer` for every completion; an async context manager.

    Attributes:
        calls: of completions, in the order in which they came.
        num_running: completions that are being answered.
        max_running: the most that ever were together.
    """

    def __init__(self, answer: Answer = answer_in_full, *, speaks_llama_cpp: bool = False) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.max_running = 0
        self.num_running = 0
        self._speaks_llama_cpp = speaks_llama_cpp
        self._tokenizer = byte_level()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = request_line.split(" ")
        call = Call(method=method, path=path, headers=headers, body=json.loads(raw or b"{}"), writer=writer)
        if path.endswith("/completions"):
            self.calls.append(call)
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            try:
                await self.answer(call)
            finally:
                self.num_running -= 1
        else:
            self._answer_question(call)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _answer_question(self, call: Call) -> None:
        given = call.body.get("content" if self._speaks_llama_cpp else "prompt")
        match call.path:
            case "/v1/models":
                call.send_json({"data": [{"id": MODEL}]})
            case "/version":
                call.send_json({"version": "1.2.3"})
            case "/tokenize" if given is not None:
                call.send_json({"tokens": self._tokenizer.encode(given).ids})
            case "/detokenize":
                text = self._tokenizer.decode(call.body["tokens"], skip_special_tokens=False)
                call.send_json({"content" if self._speaks_llama_cpp else "prompt": text})
            case _:
                call.send_json({"error": {"message": "there is no such route"}}, status=404)
