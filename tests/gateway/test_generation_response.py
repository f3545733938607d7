"""Rows S02, S17, S22 of cases: when the header leaves, and what a client that leaves or stalls leads to."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore, ServedModel
from tests.fakes.http_server import Gateway, running_gateway, until
from tests.fakes.pipeline import FakePipeline, Step, play
from weir.core import errors

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
IN_TIME_S = 5.0


def endless(model) -> FakePipeline:
    """Says one token, then nothing for ever."""
    ids = model.tokenizer.encode("Hello there")

    def script(prompt) -> Sequence[Step]:
        first, last = play(ids, prompt)
        return [first, asyncio.Event(), last]

    return FakePipeline(script)


async def wait_until_idle(gateway: Gateway) -> None:
    """Every prompt is left and every permit is back."""
    async with asyncio.timeout(IN_TIME_S):
        await gateway.pipeline.left.wait()
        await gateway.admission.wait_until_idle()
    assert gateway.pipeline.num_inside == 0
    assert gateway.admission.num_running == 0


@pytest.mark.parametrize("is_stream", [True, False])
async def test_s17_a_client_that_leaves_before_the_workers_granted_ends_the_work(model, models, is_stream):
    pipeline = endless(model)
    pipeline.gate = asyncio.Event()
    async with running_gateway(pipeline, models) as gateway:
        _, writer = await gateway.send_raw(PATH, {**CHAT, "stream": is_stream})
        await pipeline.asked.wait()
        writer.close()
        await wait_until_idle(gateway)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_s17_a_client_that_leaves_in_the_middle_ends_the_work(model, models, is_stream):
    async with running_gateway(endless(model), models) as gateway:
        reader, writer = await gateway.send_raw(PATH, {**CHAT, "stream": is_stream})
        await gateway.pipeline.entered.wait()
        if is_stream:
            await reader.readuntil(b"Hello")
        writer.close()
        await wait_until_idle(gateway)


async def test_s17_a_half_closed_connection_ends_the_work(model, models):
    async with running_gateway(endless(model), models) as gateway:
        _, writer = await gateway.send_raw(PATH, {**CHAT, "stream": False})
        await gateway.pipeline.entered.wait()
        writer.write_eof()
        await wait_until_idle(gateway)
        writer.close()


async def test_a_client_that_leaves_the_queue_is_never_started(model, models):
    async with running_gateway(endless(model), models, max_running=1) as gateway:
        _, first = await gateway.send_raw(PATH, {**CHAT, "stream": True})
        await gateway.pipeline.entered.wait()
        _, second = await gateway.send_raw(PATH, {**CHAT, "stream": True})
        await until(lambda: gateway.admission.num_waiting == 1)
        second.close()
        await until(lambda: gateway.admission.num_waiting == 0)
        assert len(gateway.pipeline.prompts) == 1
        first.close()
        await wait_until_idle(gateway)


async def test_a_client_that_leaves_while_it_sends_its_request_is_forgotten(model, models):
    async with running_gateway(endless(model), models) as gateway:
        _, writer = await gateway.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert (await gateway.client.get("/health")).status_code == 200
        assert gateway.pipeline.prompts == []


async def test_one_client_that_leaves_disturbs_no_other(model, models):
    gate = asyncio.Event()
    ids = model.tokenizer.encode("Hello there")

    def script(prompt) -> Sequence[Step]:
        first, last = play(ids, prompt)
        return [first, gate, last]

    async with running_gateway(FakePipeline(script), models) as gateway, asyncio.TaskGroup() as group:
        stays = group.create_task(gateway.client.post(PATH, json={**CHAT, "max_tokens": 2}))
        await gateway.pipeline.entered.wait()
        _, leaves = await gateway.send_raw(PATH, {**CHAT, "stream": True})
        await until(lambda: len(gateway.pipeline.prompts) == 2)
        leaves.close()
        await until(gateway.pipeline.left.is_set)
        gate.set()
        assert (await stays).json()["choices"][0]["message"]["content"] == "Hello there"


async def test_s22_two_requests_of_one_client_id_are_two_requests(model, models):
    gate = asyncio.Event()
    answers = {"hi": model.tokenizer.encode("Hello"), "ho": model.tokenizer.encode("world")}
    by_ids = {model.tokenizer.encode(text): ids for text, ids in answers.items()}

    def script(prompt) -> Sequence[Step]:
        return [gate, *play(by_ids[prompt.prompt_token_ids], prompt, stop_token_id=2)]

    async with running_gateway(FakePipeline(script), models) as gateway, asyncio.TaskGroup() as group:
        header = {"x-request-id": "same-1"}
        calls = [
            group.create_task(
                gateway.client.post("/v1/completions", json={"prompt": text, "request_id": "same-1"}, headers=header)
            )
            for text in answers
        ]
        await until(lambda: len(gateway.pipeline.prompts) == 2)
        gate.set()
        texts = [(await call).json()["choices"][0]["text"] for call in calls]
        ids = {(await call).json()["id"] for call in calls}
        assert [(await call).headers["x-request-id"] for call in calls] == ["same-1", "same-1"]
    assert texts == ["Hello", "world"]
    assert len(ids) == 2
    assert {prompt.request_id for prompt in gateway.pipeline.prompts} == ids
    assert {prompt.label for prompt in gateway.pipeline.prompts} == {"same-1"}


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CapacityExceededError("never fits"), 400),
        (errors.OverloadedError("full", retry_after_s=3), 429),
        (errors.NoWorkerError("no decode worker", hop="decode", retry_after_s=1), 503),
        (errors.WorkerLostError("gone", hop="prefill"), 502),
        (errors.DeadlineExceededError("too late", hop="prefill"), 504),
        (errors.WeirError("a fault", hop="decode"), 500),
    ],
)
async def test_s02_what_is_refused_before_the_header_has_its_own_status(model, models, error, status, is_stream):
    pipeline = endless(model)
    pipeline.refusal = error
    async with running_gateway(pipeline, models) as gateway:
        answer = await gateway.client.post(PATH, json={**CHAT, "stream": is_stream})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"] == error.message
    assert answer.headers.get("retry-after") == (str(error.retry_after_s) if error.retry_after_s else None)


async def test_one_refused_prompt_refuses_the_request_and_ends_the_others(model, models):
    class HalfRefusing(FakePipeline):
        def generate(self, prompt):
            self.refusal = errors.NoWorkerError("none") if len(self.prompts) == 1 else None
            return super().generate(prompt)

    pipeline = HalfRefusing(endless(model).script)
    async with running_gateway(pipeline, models) as gateway:
        answer = await gateway.client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True})
        assert answer.status_code == 503
        await wait_until_idle(gateway)


async def test_the_header_leaves_once_every_prompt_is_taken_on(model, models):
    gates = [asyncio.Event(), asyncio.Event()]
    script = endless(model).script

    class Gated(FakePipeline):
        def generate(self, prompt):
            self.gate = gates[len(self.prompts)]
            return super().generate(prompt)

    pipeline = Gated(script)
    async with running_gateway(pipeline, models, http=HttpSettings(keep_alive_s=0.01)) as gateway:
        reader, writer = await gateway.send_raw("/v1/completions", {"prompt": ["a", "b"], "stream": True})
        gates[0].set()
        await pipeline.asked.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        gates[1].set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await wait_until_idle(gateway)


async def test_a_full_gateway_says_when_to_come_back(model, models):
    async with running_gateway(endless(model), models, max_running=1, max_waiting=0) as gateway:
        _, writer = await gateway.send_raw(PATH, {**CHAT, "stream": True})
        await gateway.pipeline.entered.wait()
        answer = await gateway.client.post(PATH, json=CHAT)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        writer.close()
        await wait_until_idle(gateway)


async def test_a_client_that_stops_reading_is_dropped_and_holds_up_nobody(model):
    ids = model.tokenizer.encode("Hello") * 200_000

    def script(prompt) -> Sequence[Step]:
        return play(ids, prompt, tokens_a_step=2000) if prompt.sampling.max_tokens > 9 else play(ids[:5], prompt)

    settings = HttpSettings(stall_timeout_s=0.3)
    model_with_room = ModelStore([_with_context(model, 10**6)])
    async with running_gateway(FakePipeline(script), model_with_room, http=settings) as gateway:
        reader, writer = await gateway.send_raw(PATH, {**CHAT, "stream": True, "max_tokens": 200_000})
        await gateway.pipeline.entered.wait()
        other = await gateway.client.post(PATH, json={**CHAT, "max_tokens": 5})
        assert other.json()["usage"]["completion_tokens"] == 5
        await wait_until_idle(gateway)
        with contextlib.suppress(ConnectionError):
            assert b"[DONE]" not in await reader.read(-1)
        writer.close()


async def test_the_deadline_is_that_of_the_request(model, models):
    async with running_gateway(endless(model), models, http=HttpSettings(request_timeout_s=100.0)) as gateway:
        _, writer = await gateway.send_raw(PATH, {**CHAT, "stream": True, "priority": -3, "cache_salt": "s"})
        await gateway.pipeline.entered.wait()
        (prompt,) = gateway.pipeline.prompts
        assert prompt.deadline.at_s == prompt.arrived_s + 100.0
        assert (prompt.priority, prompt.cache_salt) == (-3, "s")
        writer.close()
        await wait_until_idle(gateway)


async def test_events_after_a_stop_string_are_not_waited_for(model, models):
    ids = model.tokenizer.encode("DEFGHLM")

    def script(prompt) -> Sequence[Step]:
        first, second, third = play(ids, prompt)
        return [first, second, asyncio.Event(), third]

    async with running_gateway(FakePipeline(script), models) as gateway:
        answer = await gateway.client.post("/v1/completions", json={"prompt": "hi", "stop": ["GH"]})
        assert answer.json()["choices"][0]["text"] == "DEF"
        assert gateway.pipeline.finished_choices == [(answer.json()["id"], 0)]


def _with_context(model: ServedModel, max_model_len: int) -> ServedModel:
    return replace(model, card=replace(model.card, max_model_len=max_model_len))
