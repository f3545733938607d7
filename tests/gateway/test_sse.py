"""Rows S01 and S03 of cases: the bytes of an event stream."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.client_connection import find_client_gone
from gateway.http_settings import HttpSettings
from gateway.sse import EventStream, encode_event
from tests.fakes.http_server import Gateway, running_gateway
from tests.fakes.pipeline import FakePipeline, Step, play
from weir.core.errors import WorkerLostError

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


def saying(model, text: str, *, num_cached_tokens: int = 0) -> FakePipeline:
    ids = model.tokenizer.encode(text)
    return FakePipeline(lambda prompt: play(ids, prompt, stop_token_id=2, num_cached_tokens=num_cached_tokens))


def data_of(raw: bytes) -> list[Any]:
    """The data of each event, which must all be one line, and an end mark last."""
    assert raw.endswith(b"\n\n")
    events = raw.removesuffix(b"\n\n").split(b"\n\n")
    lines = [event for event in events if not event.startswith(b":")]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


async def stream(gateway: Gateway, path: str, body: dict[str, Any]) -> bytes:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_the_bytes_of_a_chat_stream(model, models):
    async with running_gateway(saying(model, "Hello\n中国"), models) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", json=CHAT)
    first = json.loads(answer.content.partition(b"\n\n")[0].removeprefix(b"data: "))
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"tiny",'
        f'"choices":[{{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null}]}\n\n'
    assert answer.content.decode() == (
        f'{head}{{"role":"assistant","content":""}}{tail}'
        f'{head}{{"content":"Hello"}}{tail}'
        f'{head}{{"content":"\\n"}}{tail}'
        f'{head}{{"content":"\\u4e2d\\u56fd"}}{tail}'
        f'{head}{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert first["id"].startswith("chatcmpl-")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


async def test_the_bytes_of_a_completion_stream(model, models):
    async with running_gateway(saying(model, "Hello"), models) as gateway:
        answer = await gateway.client.post("/v1/completions", json={"prompt": "hi", "stream": True, **USAGE})
    first = json.loads(answer.content.partition(b"\n\n")[0].removeprefix(b"data: "))
    head = f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"tiny"'
    assert answer.content.decode() == (
        f'{head},"choices":[{{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head},"choices":[{{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}}],'
        f'"usage":null}}\n\n'
        f'{head},"choices":[],"usage":{{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        f'"prompt_tokens_details":{{"cached_tokens":0}}}}}}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})])
async def test_s01_usage_comes_once_and_only_if_asked_for(model, models, path, body):
    async with running_gateway(saying(model, "Hello there world", num_cached_tokens=1), models) as gateway:
        plain = data_of(await stream(gateway, path, {**body, "stream": True}))
        assert not any("usage" in chunk for chunk in plain)
        asked = data_of(await stream(gateway, path, {**body, "stream": True, **USAGE}))
        whole = (await gateway.client.post(path, json={**body, "stream": False})).json()
    *chunks, last = asked
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_continuous_usage_grows_with_every_chunk(model, models):
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with running_gateway(saying(model, "Hello there world"), models) as gateway:
        chunks = data_of(await stream(gateway, "/v1/chat/completions", {**CHAT, **options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 4, 4]
    totals = [chunk["usage"]["total_tokens"] - chunk["usage"]["prompt_tokens"] for chunk in chunks]
    assert totals == counts


async def test_s03_silence_is_filled_with_comment_lines(model, models):
    quiet = asyncio.Event()
    ids = model.tokenizer.encode("Hello there")

    def script(prompt) -> Sequence[Step]:
        first, *rest = play(ids, prompt)
        return [quiet, first, *rest]

    settings = HttpSettings(keep_alive_s=0.02)
    async with running_gateway(FakePipeline(script), models, http=settings) as gateway:
        raw = b""
        async with gateway.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            async for chunk in answer.aiter_raw():
                raw += chunk
                if raw.count(b"\n\n") == 3:
                    assert raw == b": keep-alive\n\n" * 3
                    quiet.set()
    assert len(data_of(raw)) == 3


@pytest.mark.parametrize("hop", ["gateway", "prefill", "transfer", "decode"])
async def test_s03_a_failure_in_mid_stream_is_data_naming_the_hop_and_then_the_end(model, models, hop):
    ids = model.tokenizer.encode("Hello there")
    error = WorkerLostError("the worker is gone", hop=hop)
    pipeline = FakePipeline(lambda prompt: [play(ids, prompt)[0], error])
    async with running_gateway(pipeline, models) as gateway:
        raw = await stream(gateway, "/v1/chat/completions", {**CHAT, **USAGE})
    *_, last = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: ")) == {
        "error": {
            "message": "the worker is gone",
            "type": "server_error",
            "param": None,
            "code": "worker_lost",
            "hop": hop,
        }
    }
    assert b"[DONE]" not in raw
    assert b'"Hello"' in raw


async def test_a_fault_of_ours_in_mid_stream_is_told_without_its_trace(model, models, caplog):
    ids = model.tokenizer.encode("Hello there")

    def script(prompt) -> Sequence[Step]:
        steps: list[Any] = [play(ids, prompt)[0], "no step at all"]
        return steps

    async with running_gateway(FakePipeline(script), models) as gateway:
        raw = await stream(gateway, "/v1/chat/completions", CHAT)
    *_, last = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"Traceback" not in raw
    assert any(record.exc_info for record in caplog.records)


async def test_all_choices_of_a_step_leave_in_one_message():
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    events = EventStream(send, HttpSettings())
    await events.start()
    await events.send(encode_event({"a": 1}) + encode_event({"b": "é"}))
    await events.end()
    assert sent == [b"", b'data: {"a":1}\n\ndata: {"b":"\\u00e9"}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("keep_alive_s", [0.01, 100.0])
async def test_a_write_that_never_ends_is_noticed(keep_alive_s):
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    events = EventStream(send, HttpSettings(keep_alive_s=keep_alive_s, stall_timeout_s=0.02))
    await events.start()

    async def watch_while_sending() -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(events.watch())
            group.create_task(events.send("data: {}\n\n"))

    with pytest.raises(ExceptionGroup) as caught:
        await watch_while_sending()
    assert find_client_gone(caught.value) is not None


async def test_no_comment_leaves_before_the_header():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        is_sent.set()

    is_sent = asyncio.Event()
    events = EventStream(send, HttpSettings(keep_alive_s=0.01))
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(events.watch())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await is_sent.wait()
        await events.start()
        is_sent.clear()
        await is_sent.wait()
        watch.cancel()
    assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == b": keep-alive\n\n"


def test_what_json_cannot_write_is_never_sent():
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_event({"logprob": float("-inf")})
