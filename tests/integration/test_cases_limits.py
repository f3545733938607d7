"""Rows S02, S10, S12 to S16, S21, S32, S33 and S40 of the cases on the whole system: lengths, and what is refused."""

from __future__ import annotations

import asyncio
from itertools import pairwise, product
from typing import Any

import pytest

from tests.integration.real_cluster import CHAT, COMPLETIONS, HI, HI_ANSWER, KV_BYTES_PER_TOKEN, RealCluster, until

CONTEXT = 8192
JSON = {"content-type": "application/json"}
WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
    (COMPLETIONS, {"prompt": "hi", "logit_bias": {"49152": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "hi", "logit_bias": {"-1": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "hi", "logit_bias": {"2": 1e9}}, "logit_bias"),
    (COMPLETIONS, {"prompt": [49152]}, "prompt"),
    (COMPLETIONS, {"prompt": "hi", "n": 1.5}, "n"),
    (COMPLETIONS, {"prompt": "hi", "stream": "false"}, "stream"),
    (CHAT, {"messages": [{"role": "bot", "content": "hi"}]}, "messages"),
    (CHAT, {"messages": HI, "nonsense": 1}, "nonsense"),
)
"""Path, fields, and the place that the refusal names."""


@pytest.mark.parametrize("stream", [True, False])
async def test_s02_a_prompt_too_long_is_refused_by_status_streamed_or_not(real: RealCluster, stream: bool) -> None:
    messages = [{"role": "user", "content": "the " * 9000}]
    status, error = await real.refusal(CHAT, messages=messages, stream=stream)
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_s10_numbers_that_are_not_finite_are_refused_by_name(real: RealCluster) -> None:
    names = ("temperature", "top_p", "min_p", "frequency_penalty")
    for name, constant in product(names, ("NaN", "Infinity", "-Infinity", "1e999", '"nan"')):
        body = f'{{"prompt": "hi", "max_tokens": 2, "{name}": {constant}}}'
        answer = await real.client.post(COMPLETIONS, content=body, headers=JSON)
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


async def test_s12_null_is_not_given(real: RealCluster) -> None:
    assert (await real.completion("hi", max_tokens=None))["usage"]["completion_tokens"] <= 16
    names = ("max_tokens", "max_completion_tokens", "stop", "seed", "logit_bias", "tools", "response_format")
    chat = await real.chat(**dict.fromkeys(names))
    assert chat["choices"][0]["message"]["content"] == HI_ANSWER
    assert chat["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_taken"),
    [
        (8, 8184, True),
        (8, 8185, False),
        (8191, 1, True),
        (8192, 1, False),
        (8193, 1, False),
        (8, -1, False),
        (8, 0, False),
    ],
)
async def test_s13_prompt_and_output_may_fill_the_context_exactly(
    real: RealCluster, num_prompt: int, max_tokens: int, is_taken: bool
) -> None:
    body = {"prompt": [260] * num_prompt, "max_tokens": max_tokens}
    if is_taken:
        reader, writer = await real.begin(COMPLETIONS, **body, stream=True, ignore_eos=True)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        return
    status, error = await real.refusal(COMPLETIONS, **body)
    assert status == 400
    if max_tokens > 0:
        assert error["code"] == "context_length_exceeded"
        for figure in (CONTEXT, num_prompt, max_tokens):
            assert str(figure) in error["message"]
    else:
        assert error["param"] == "max_tokens"


async def test_s14_s32_s33_what_is_wrong_is_refused_by_place(real: RealCluster) -> None:
    for path, fields, param in WRONG:
        status, error = await real.refusal(path, **fields)
        assert status == 400
        assert error["param"].startswith(param), (fields, error)


async def test_s14_s32_s33_a_running_stream_notices_none_of_them(real: RealCluster) -> None:
    body = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 60, "ignore_eos": True}
    alone = await real.stream(COMPLETIONS, **body)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(real.stream(COMPLETIONS, **body))
        for content in (b"", b"[]", b'{"prompt": "hi', b'{"prompt": "a", "prompt": "b"}', b"\xef\xbb\xbf{}"):
            assert (await real.client.post(COMPLETIONS, content=content, headers=JSON)).status_code == 400
        plain = await real.client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415
        for fields in ({"prompt": ""}, {"prompt": "hi", "temperature": -1}, {"prompt": "hi", "model": "nobody"}):
            assert (await real.refusal(COMPLETIONS, **fields))[0] in (400, 404)
    assert running.result().text() == alone.text()


async def test_s15_nothing_is_put_before_the_template(real: RealCluster) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    completion = await real.completion(text, max_tokens=1, return_token_ids=True)
    assert completion["usage"]["prompt_tokens"] == 10
    chat = await real.chat(max_tokens=1, return_token_ids=True)
    assert chat["usage"]["prompt_tokens"] == 31
    ids = chat["prompt_token_ids"]
    assert ids[0] == 1
    assert (1, 1) not in set(pairwise(ids)), "a doubled BOS"
    turns = [*HI, {"role": "assistant", "content": "Hello"}, *HI]
    longer = (await real.chat(turns, max_tokens=1, return_token_ids=True))["prompt_token_ids"]
    assert longer[:31] == ids


async def test_s16_content_in_parts_is_the_same_conversation(real: RealCluster) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = await real.chat(parts)
    assert chat["usage"]["prompt_tokens"] == 31
    assert chat["choices"][0]["message"]["content"] == HI_ANSWER
    for content in ([], "", None, [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]):
        answer = await real.client.post(
            CHAT, json={"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        )
        assert answer.status_code in (200, 400)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_s21_the_first_token_of_prefill_is_counted(real: RealCluster, max_tokens: int) -> None:
    prompt = (
        "The first tokens of this prompt are computed by the prefill worker and nowhere else, since it is long: 1, 2,"
    )
    expected = (await real.completion(prompt, max_tokens=8, return_token_ids=True))["choices"][0]["token_ids"]
    for fields in ({}, {"min_tokens": 1}, {"n": 2}):
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **fields}
        whole = await real.completion(**body)
        num_choices = body.get("n", 1)
        assert whole["usage"]["completion_tokens"] == max_tokens * num_choices
        for choice in whole["choices"]:
            assert choice["token_ids"] == expected[:max_tokens]
            assert choice["finish_reason"] == "length"
        streamed = await real.stream(COMPLETIONS, **body)
        assert streamed.finish_reasons() == {index: ["length"] for index in range(num_choices)}
        assert [streamed.text(choice["index"]) for choice in whole["choices"]] == [
            choice["text"] for choice in whole["choices"]
        ]


async def test_s32_the_last_token_may_be_forced_and_the_map_may_be_huge(real: RealCluster) -> None:
    forced = await real.completion("hi", max_tokens=2, logit_bias={"49151": 100}, return_token_ids=True)
    assert forced["choices"][0]["token_ids"] == [49151, 49151]
    everything = {str(token): 0 for token in range(49152)}
    plain = await real.completion("hi", max_tokens=2)
    assert (await real.completion("hi", max_tokens=2, logit_bias=everything))["choices"] == plain["choices"]


async def test_s08_log_probabilities_are_numbers(real: RealCluster) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0.01, "top_p": 0.3, "logprobs": 5}
    logprobs = (await real.completion("1, 2, 3, 4, 5,", **fields))["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == " 6, "
    assert all(0 >= value >= -9999 for value in logprobs["token_logprobs"])
    assert all(len(top) >= 5 for top in logprobs["top_logprobs"])


@pytest.mark.full
async def test_s40_a_prompt_of_8000_tokens_is_handed_over(real: RealCluster) -> None:
    body = {"prompt": [500 + index * 7 % 991 for index in range(8000)], "max_tokens": 2}  # no other test's beginning
    real.client.timeout = 900
    decode = real.workers["decode"]
    before = decode.metrics().get("weir_handoff_bytes_total", 0.0)
    handed = await real.completion(**body)

    def has_moved() -> bool:  # the counter is brought up to date now and then
        return decode.metrics()["weir_handoff_bytes_total"] - before >= 8000 * KV_BYTES_PER_TOKEN

    await until(has_moved, lambda: "the whole prompt's KV is handed over", 20.0)
    again = await real.completion(**body)
    assert again["choices"] == handed["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 7984
