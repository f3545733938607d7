"""OpenAI's `/v1/completions`, streamed, over OpenVINO GenAI's ContinuousBatchingPipeline, whose wheel has no server.

    python benchmarks/openvino_server.py --model FILE.gguf --tokenizer DIR --port 8000

Runs in the peer's own environment (openvino-genai, tokenizers, uvicorn) and imports nothing of Weir. The pipeline steps
in a process of its own: a step holds the interpreter's lock from its beginning to its end, and would starve HTTP. What
a step made crosses in one message; every token is an event of its own, as with the servers it is compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MODEL = "model"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the pipeline."""

    model: Path
    num_threads: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request on its way to the pipeline."""

    request_id: int
    token_ids: list[int]
    max_tokens: int
    temperature: float
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one step made for one request."""

    request_id: int
    token_ids: list[int]
    finish_reason: str | None


def run_pipeline(settings: Settings, front: Connection) -> None:
    """The pipeline's process: says "ready", then takes `Asked`, and gives a list of `Made` a step."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduling = genai.SchedulerConfig()
    scheduling.num_kv_blocks = settings.num_kv_blocks
    scheduling.max_num_seqs = settings.max_num_seqs
    scheduling.max_num_batched_tokens = settings.max_num_batched_tokens
    scheduling.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": settings.num_threads}
    pipeline = genai.ContinuousBatchingPipeline(str(settings.model), scheduling, "CPU", properties)
    handles: dict[int, Any] = {}

    def add(asked: Asked) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = asked.max_tokens
        config.ignore_eos = asked.ignore_eos
        config.do_sample = asked.temperature > 0
        if config.do_sample:
            config.temperature = asked.temperature
        token_ids = openvino.Tensor(np.array([asked.token_ids], dtype=np.int64))
        handles[asked.request_id] = pipeline.add_request(asked.request_id, token_ids, config)

    def read() -> Iterator[Made]:
        for request_id, handle in list(handles.items()):
            while handle.can_read():
                (output,) = handle.read().values()
                reason = output.finish_reason.name
                is_finished = reason != "NONE"
                if is_finished:
                    handles.pop(request_id, None)
                yield Made(
                    request_id=request_id,
                    token_ids=list(output.generated_ids),
                    finish_reason=reason.lower() if is_finished else None,
                )

    front.send("ready")
    try:
        while True:
            while front.poll(0 if pipeline.has_non_finished_requests() else None):
                add(front.recv())
            pipeline.step()
            if made := list(read()):
                front.send(made)
    except EOFError:  # the front has ended
        return


class CompletionServer:
    """The ASGI application: the few paths that a load generator needs."""

    def __init__(self, pipeline: Connection, tokenizer: Tokenizer) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._streams: dict[int, asyncio.Queue[Made]] = {}
        self._last_id = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif (scope["method"], scope["path"]) == ("GET", "/health"):
            await _answer(send, 200, {"status": "ok"})
        elif (scope["method"], scope["path"]) == ("GET", "/v1/models"):
            await _answer(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif (scope["method"], scope["path"]) == ("POST", "/v1/completions"):
            await self._complete(json.loads(await _body(receive)), send)
        else:
            await _answer(send, 404, {"error": {"message": "no such path"}})

    async def _live(self, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipeline.fileno(), self._deliver)
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        loop.remove_reader(self._pipeline.fileno())
        await send({"type": "lifespan.shutdown.complete"})

    def _deliver(self) -> None:
        while self._pipeline.poll():
            for made in self._pipeline.recv():
                if made.request_id in self._streams:
                    self._streams[made.request_id].put_nowait(made)

    async def _complete(self, request: Message, send: Send) -> None:
        if not request.get("stream"):
            await _answer(send, 400, {"error": {"message": "only streams are served"}})
            return
        prompt = request["prompt"]
        token_ids = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_tokens, finish_reason = 0, None
        decoder = DecodeStream(skip_special_tokens=False)
        with self._stream(token_ids, request) as stream:
            while finish_reason is None:
                made = await stream.get()
                num_tokens += len(made.token_ids)
                finish_reason = made.finish_reason
                text = "".join(decoder.step(self._tokenizer, token_id) or "" for token_id in made.token_ids)
                choice = {"index": 0, "text": text, "finish_reason": finish_reason}
                await _event(send, {"object": "text_completion", "model": MODEL, "choices": [choice]})
        usage = {"prompt_tokens": len(token_ids), "completion_tokens": num_tokens}
        await _event(send, {"object": "text_completion", "model": MODEL, "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    @contextmanager
    def _stream(self, token_ids: list[int], request: Message) -> Iterator[asyncio.Queue[Made]]:
        """What the pipeline makes of a prompt. A client that leaves early does not stop it."""
        self._last_id += 1
        asked = Asked(
            request_id=self._last_id,
            token_ids=token_ids,
            max_tokens=request.get("max_tokens") or 16,
            temperature=request.get("temperature", 1.0),
            ignore_eos=request.get("ignore_eos", False),
        )
        self._streams[asked.request_id] = asyncio.Queue()
        try:
            self._pipeline.send(asked)
            yield self._streams[asked.request_id]
        finally:
            del self._streams[asked.request_id]


async def _body(receive: Receive) -> bytes:
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    return body


async def _event(send: Send, event: Message) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _answer(send: Send, status: int, content: Message) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


@contextmanager
def running_pipeline(settings: Settings) -> Iterator[Connection]:
    """The near end of a pipeline that is ready."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=run_pipeline, args=(settings, far), daemon=True)
    process.start()
    far.close()
    try:
        near.recv()
        yield near
    finally:
        near.close()
        process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a directory of OpenVINO's")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with a tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--num-kv-blocks", type=int, required=True, help="blocks of 32 tokens")
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    args = parser.parse_args()
    settings = Settings(
        model=args.model,
        num_threads=args.num_threads,
        num_kv_blocks=args.num_kv_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    with running_pipeline(settings) as pipeline:
        uvicorn.run(CompletionServer(pipeline, tokenizer), host="127.0.0.1", port=args.port, access_log=False)


if __name__ == "__main__":
    main()
