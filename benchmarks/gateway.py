"""What the gateway itself costs: CPU time of its process, with workers that cost nothing behind it.

    python -m benchmarks.gateway [--streams 32] [--tokens 2000] [--requests 300] [--model-dir DIR]

A child process serves the real application over a pipeline that puts one token a step into each stream, as a decode
worker's messages would; this process is the client. Figures are CPU time of the child: medians over the rounds, with
the spread. Limits: 25 us a streamed token at 32 streams, 3 ms a request of 1,000 prompt tokens.

A token's cost is shown three times: the application by itself (its messages go nowhere), the whole process with real
sockets, and a process that does nothing but write the same bytes to as many sockets. What the whole costs beyond the
other two together is the HTTP server and what the kernel takes for waking the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import uvloop
from fastapi import FastAPI
from starlette.types import Message

from gateway.app import create_app
from gateway.generation_stream import ChoiceNews, GenerationStream
from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore, ServedModel
from gateway.prompt_request import PromptRequest
from tests.fakes.http_server import make_services, running_app
from tests.fakes.tiny_tokenizer import served_model
from weir.core.request import FinishReason, TokenDelta

NUM_ROUNDS = 5
PROMPT_TOKENS = 1000

CHUNK = b"x" * 210
"""About the bytes of one chunk with its chunked encoding."""


class SteppingPipeline:
    """Gives every stream one token a step, all streams in one turn of the loop."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._streams: dict[GenerationStream, tuple[PromptRequest, int]] = {}
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def generate(self, prompt: PromptRequest) -> AsyncIterator[GenerationStream]:
        stream = GenerationStream(1, max_buffered_tokens=1_000_000, on_finish=lambda _: None)
        self._streams[stream] = (prompt, 0)
        self._wake.set()
        try:
            yield stream
        finally:
            self._streams.pop(stream, None)

    async def run(self) -> None:
        while True:
            if not self._streams:
                self._wake.clear()
                await self._wake.wait()
            for stream, (prompt, position) in list(self._streams.items()):
                is_last = position + 1 == prompt.sampling.max_tokens
                token_id = self._token_ids[position % len(self._token_ids)]
                delta = TokenDelta(
                    first_index=position,
                    token_ids=(token_id,),
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
                self._streams[stream] = (prompt, position + 1)
                stream.put(ChoiceNews(choice_index=0, delta=delta))
                if is_last:
                    del self._streams[stream]
            await asyncio.sleep(0.001)


class BareWriter(asyncio.Protocol):
    """Writes the bytes of a chunk to every connection at each step, and knows nothing else."""

    connections: ClassVar[dict[asyncio.Transport, int]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        self.connections[self._transport] = int(data)

    @classmethod
    async def run(cls) -> None:
        while True:
            for transport, remaining in list(cls.connections.items()):
                transport.write(CHUNK)
                cls.connections[transport] = remaining - 1
                if remaining == 1:
                    del cls.connections[transport]
                    transport.close()
            await asyncio.sleep(0.001)


def serve(model_dir: Path | None, pipe: Connection) -> None:
    """The child: answers messages on `pipe` with CPU seconds, its own so far or those of a run of the application."""
    uvloop.run(_serve(model_dir, pipe))


async def _serve(model_dir: Path | None, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = ServedModel.load(model_dir) if model_dir else served_model(Path(scratch), max_model_len=1_000_000)
        pipeline = SteppingPipeline(model.tokenizer.encode("Hello there world, the answer is 9."))
        http = HttpSettings()
        app = create_app(make_services(pipeline, ModelStore([model]), http=http))
        bare = await asyncio.get_running_loop().create_server(BareWriter, "127.0.0.1", 0)
        async with bare, running_app(app, http) as port, asyncio.TaskGroup() as group:
            tasks = [group.create_task(pipeline.run()), group.create_task(BareWriter.run())]
            pipe.send((port, bare.sockets[0].getsockname()[1]))
            while (asked := await asyncio.to_thread(pipe.recv)) is not None:
                started_s = time.process_time()
                if asked:
                    await call_all(app, *asked)
                    pipe.send(time.process_time() - started_s)
                else:
                    pipe.send(started_s)
            for task in tasks:
                task.cancel()


async def call_all(app: FastAPI, num_streams: int, num_tokens: int) -> None:
    """The application without a server: streams whose messages are thrown away."""
    body = chat_body(num_tokens)

    async def call() -> None:
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            """Nobody listens."""

        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
            "headers": [(b"content-type", b"application/json")], "server": ("x", 80), "client": ("x", 1),
        }  # fmt: skip
        await app(scope, receive, send)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(call())


class Child:
    """The serving process as the client sees it."""

    def __init__(self, model_dir: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=serve, args=(model_dir, inner))
        self._process.start()
        self.port, self.bare_port = self._pipe.recv()

    def cpu_s(self) -> float:
        self._pipe.send(())
        return float(self._pipe.recv())

    def application_cpu_s(self, num_streams: int, num_tokens: int) -> float:
        """CPU seconds of as many streams through the application alone."""
        self._pipe.send((num_streams, num_tokens))
        return float(self._pipe.recv())

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def chat_body(num_tokens: int) -> bytes:
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": num_tokens}
    return json.dumps(fields).encode()


async def read_bare(port: int, num_chunks: int) -> None:
    """One connection to the bare writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(str(num_chunks).encode())
    assert len(await reader.read(-1)) == num_chunks * len(CHUNK)
    writer.close()


async def stream_once(port: int, num_tokens: int) -> None:
    """One streamed chat, read as fast as it comes."""
    body = chat_body(num_tokens)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    assert answer.count(b"data: {") == num_tokens + 1, answer[:500]
    writer.close()


async def at_once(read: Callable[[int, int], Coroutine[Any, Any, None]], port: int, num: int, num_tokens: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(num):
            group.create_task(read(port, num_tokens))


async def request_many(port: int, num_requests: int, prompt: object) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(num_requests):
            answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text


async def long_prompts(port: int) -> tuple[str, list[int]]:
    """A text and a list of ids of `PROMPT_TOKENS` tokens."""
    text = ""
    ids: list[int] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while len(ids) < PROMPT_TOKENS:
            text += f"The quick brown fox number {len(ids)} jumps over the lazy dog. "
            ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": ids[:PROMPT_TOKENS]})).json()["prompt"]
    return text, ids[:PROMPT_TOKENS]


def measure(cpu_s: Callable[[], float], count: int, unit_s: float) -> str:
    """CPU for each of `count` units: median and spread over the rounds, in `unit_s`."""
    samples = [cpu_s() / count / unit_s for _ in range(NUM_ROUNDS)]
    return f"{statistics.median(samples):7.2f}  ({min(samples):.2f} to {max(samples):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model-dir", type=Path, help="a prepared model; default: a tiny tokenizer made here")
    options = parser.parse_args()
    num_streams, num_tokens = options.streams, options.tokens
    child = Child(options.model_dir)

    def of(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], float]:
        """CPU seconds of the child while this process does `work`."""

        def cpu_s() -> float:
            before_s = child.cpu_s()
            uvloop.run(work())
            return child.cpu_s() - before_s

        return cpu_s

    try:
        text, ids = uvloop.run(long_prompts(child.port))
        uvloop.run(at_once(stream_once, child.port, 4, 50))
        print(f"us of CPU a streamed token, {num_streams} streams of {num_tokens} tokens")
        for name, cpu_s in (
            ("application alone", lambda: child.application_cpu_s(num_streams, num_tokens)),
            ("whole process", of(lambda: at_once(stream_once, child.port, num_streams, num_tokens))),
            ("bare writes", of(lambda: at_once(read_bare, child.bare_port, num_streams, num_tokens))),
        ):
            print(f"  {name:18} {measure(cpu_s, num_streams * num_tokens, 1e-6)}")
        print(f"ms of CPU a request of {PROMPT_TOKENS} prompt tokens")
        for name, prompt in (("as text", text), ("as token ids", ids)):
            cpu_s = of(partial(request_many, child.port, options.requests, prompt))
            print(f"  {name:18} {measure(cpu_s, options.requests, 1e-3)}")
    finally:
        child.stop()


if __name__ == "__main__":
    main()
