"""Rows S01, S03 to S07, S09 and S22 of the cases, on the real model through both services: what a client reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.real_cluster import CHAT, COMPLETIONS, HI, HI_ANSWER, RealCluster, read_stream

P_ALPHA = "Here is the English alphabet: ABC"
P_CJK = "鼠标 中国 鼠标 中国 鼠标"
P_NUM = "1, 2, 3, 4, 5,"
USAGE = {"stream_options": {"include_usage": True}}


async def test_s01_usage_comes_once_and_only_if_asked_for(real: RealCluster) -> None:
    asked = await real.stream(CHAT, messages=HI, **USAGE)
    assert asked.text() == HI_ANSWER
    assert [event["usage"] for event in asked.chunks if event.get("usage")] == []
    assert [event["usage"]["prompt_tokens"] for event in asked.events if not event["choices"]] == [31]
    assert asked.events[-1]["choices"] == []
    plain = await real.stream(CHAT, messages=HI)
    assert plain.text() == HI_ANSWER
    assert not any(event.get("usage") for event in plain.events)


async def test_s03_a_silent_stream_has_comments_and_every_event_is_whole(real: RealCluster) -> None:
    streamed = await real.stream(COMPLETIONS, prompt=[260 + index % 50 for index in range(800)], max_tokens=3)
    before, found, _ = streamed.raw.partition("data: ")
    assert found
    assert before.startswith(": keep-alive\n\n"), "the prompt takes long and nothing is said"
    assert streamed.finish_reasons() == {0: ["length"]}


@pytest.mark.parametrize(("fields", "num_tokens"), [({}, 24), ({"stop": [" 9"]}, None), ({"n": 2}, 48)])
async def test_s04_usage_is_the_same_streamed_and_whole(
    real: RealCluster, fields: dict[str, Any], num_tokens: int | None
) -> None:
    body = {"prompt": P_NUM, "max_tokens": 24, **fields}
    whole = await real.completion(**body)
    streamed = await real.stream(COMPLETIONS, **body, **USAGE)
    usage = {name: streamed.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {name: whole["usage"][name] for name in usage}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == 14, "the prompt counts once, whatever n is"
    if num_tokens is not None:
        assert usage["completion_tokens"] == num_tokens
    else:
        assert whole["choices"][0]["text"] == " 6, 7, 8,"
    for choice in whole["choices"]:
        assert streamed.text(choice["index"]) == choice["text"]
        assert streamed.finish_reasons()[choice["index"]] == [choice["finish_reason"]]


async def test_s05_streamed_characters_are_whole_and_none_is_lost(real: RealCluster) -> None:
    body = {"prompt": P_CJK, "max_tokens": 24}
    whole = (await real.completion(**body))["choices"][0]["text"]
    streamed = await real.stream(COMPLETIONS, **body)
    assert streamed.text() == whole == " 中国 鼠标 中国 鼠标 中国 鼠标"
    assert "\ufffd" not in streamed.raw
    assert len(streamed.deltas()) >= 12, "a character that is complete is sent at once"


@pytest.mark.parametrize(
    ("stop", "text", "included"),
    [
        ("DEFGHIJ", "", "DEFGHIJ"),
        ("FGH", "DE", "DEFGH"),
        ("EFG", "D", "DEFG"),
        ("M", "DEFGHIJKL", "DEFGHIJKLM"),
    ],
)
async def test_s06_s07_stop_strings_need_no_token_boundary(
    real: RealCluster, stop: str, text: str, included: str
) -> None:
    body = {"prompt": P_ALPHA, "max_tokens": 20, "stop": [stop]}
    for fields, expected in ((body, text), (body | {"include_stop_str_in_output": True}, included)):
        choice = (await real.completion(**fields))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
        streamed = await real.stream(COMPLETIONS, **fields)
        assert streamed.text() == expected
        assert streamed.finish_reasons() == {0: ["stop"]}


async def test_s09_prompt_i_owns_the_choices_from_i_n_on(real: RealCluster) -> None:
    body: dict[str, Any] = {"prompt": ["1, 2, 3,", "A B C"], "max_tokens": 4}
    alone = [(await real.completion(prompt, max_tokens=4))["choices"][0]["text"] for prompt in body["prompt"]]
    assert alone[0] != alone[1]
    body |= {"n": 2}
    whole = await real.completion(**body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    streamed = await real.stream(COMPLETIONS, **body)
    assert [streamed.text(index) for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert streamed.finish_reasons() == {index: ["length"] for index in range(4)}
    ids = await real.completion([[33, 28], [49]], max_tokens=2)
    assert [choice["index"] for choice in ids["choices"]] == [0, 1]
    status, error = await real.refusal(COMPLETIONS, prompt=["a", [33]])
    assert (status, error["param"]) == (400, "prompt")


async def test_seeded_choices_differ_from_each_other_and_repeat(real: RealCluster) -> None:
    body = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    first, second = [[choice["message"]["content"] for choice in (await real.chat(**body))["choices"]] for _ in "ab"]
    assert first == second
    assert len(set(first)) == 3


async def test_s22_two_requests_of_one_client_id_are_two_requests(real: RealCluster) -> None:
    headers = {"x-request-id": "same-1"}
    bodies = [{"prompt": prompt, "max_tokens": 40, "ignore_eos": True} for prompt in (P_NUM, P_ALPHA)]
    expected = [(await real.completion(**body))["choices"][0]["text"] for body in bodies]
    real.client.headers.update(headers)
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(real.completion(**body, request_id="same-1")) for body in bodies]
    assert [task.result()["choices"][0]["text"] for task in both] == expected
    reader, writer = await real.begin(COMPLETIONS, **bodies[0] | {"max_tokens": 2000}, stream=True, request_id="same-1")
    await reader.readuntil(b"data: ")
    async with asyncio.TaskGroup() as group:
        other = group.create_task(real.stream(COMPLETIONS, **bodies[1], request_id="same-1"))
        writer.close()
    assert other.result().text() == expected[1], "one that leaves takes nobody with it"
    await real.at_rest()
    for worker in real.workers.values():
        assert min(worker.metrics().values()) >= 0


async def test_many_streams_at_once_get_each_its_own_tokens(real: RealCluster) -> None:
    prompts = [f"{first}, {first + 1}, {first + 2}, {first + 3}," for first in range(10, 26)]
    alone = [(await real.completion(prompt, max_tokens=8))["choices"][0]["text"] for prompt in prompts[::5]]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(real.stream(COMPLETIONS, prompt=prompt, max_tokens=8)) for prompt in prompts]
    texts = [task.result().text() for task in streams]
    assert texts[::5] == alone
    for first, text in zip(range(10, 26), texts, strict=True):
        assert text.startswith(f" {first + 4}"), text


def test_reading_a_stream_is_strict() -> None:
    for raw in ('data: {"a": NaN}\n\n', "data: [DONE]\n\ndata: {}\n\n", "data: {}\n", "event: ping\n\n"):
        with pytest.raises(AssertionError):
            read_stream(200, raw)
