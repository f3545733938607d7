"""What the gateway itself costs: CPU time of its process, with workers that cost nothing behind it.

    python -m benchmarks.gateway [--streams 32] [--tokens 2000] [--requests 300] [--model-dir DIR]

A child process serves the real application over a pipeline that puts one token a step into each stream, as a decode
worker's messages would; this process is the client. Figures are CPU seconds of the child, so they hold on a busy
machine: medians over the rounds, with the spread. Floors: 25 us a streamed token at 32 streams, 3 ms a request of
1,000 prompt tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import uvloop

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


def serve(model_dir: Path | None, pipe: Connection) -> None:
    """The child: answers each message on `pipe` with its CPU seconds so far."""
    uvloop.run(_serve(model_dir, pipe))


async def _serve(model_dir: Path | None, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = ServedModel.load(model_dir) if model_dir else served_model(Path(scratch), max_model_len=1_000_000)
        pipeline = SteppingPipeline(model.tokenizer.encode("Hello there world, the answer is 9."))
        http = HttpSettings()
        app = create_app(make_services(pipeline, ModelStore([model]), http=http))
        async with running_app(app, http) as port, asyncio.TaskGroup() as group:
            stepping = group.create_task(pipeline.run())
            pipe.send((port, model.card.name))
            while await asyncio.to_thread(pipe.recv) is not None:
                pipe.send(time.process_time())
            stepping.cancel()


class Child:
    """The serving process as the client sees it."""

    def __init__(self, model_dir: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=serve, args=(model_dir, inner))
        self._process.start()
        self.port, self.model = self._pipe.recv()

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        return float(self._pipe.recv())

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


async def stream_once(port: int, num_tokens: int) -> None:
    """One streamed chat, read as fast as it comes."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": num_tokens}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    assert answer.count(b"data: {") == num_tokens + 1, answer[:500]
    writer.close()


async def stream_all(port: int, num_streams: int, num_tokens: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(stream_once(port, num_tokens))


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


def measure(child: Child, work: Callable[[], object], count: int, unit_s: float) -> str:
    """CPU of the child for each of `count` units of `work`: median and spread over the rounds."""
    samples = []
    for _ in range(NUM_ROUNDS):
        before_s = child.cpu_s()
        work()
        samples.append((child.cpu_s() - before_s) / count / unit_s)
    return f"{statistics.median(samples):7.2f}  ({min(samples):.2f} to {max(samples):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model-dir", type=Path, help="a prepared model; default: a tiny tokenizer made here")
    options = parser.parse_args()
    child = Child(options.model_dir)
    try:
        text, ids = uvloop.run(long_prompts(child.port))
        uvloop.run(stream_all(child.port, 4, 50))
        total = options.streams * options.tokens

        def streams() -> None:
            uvloop.run(stream_all(child.port, options.streams, options.tokens))

        print(f"us of CPU a streamed token, {options.streams} streams: {measure(child, streams, total, 1e-6)}")
        for name, prompt in (("as text", text), ("as ids", ids)):

            def requests(prompt: object = prompt) -> None:
                uvloop.run(request_many(child.port, options.requests, prompt))

            figure = measure(child, requests, options.requests, 1e-3)
            print(f"ms of CPU a request of {PROMPT_TOKENS} prompt tokens {name}: {figure}")
    finally:
        child.stop()


if __name__ == "__main__":
    main()
