"""Rows S04 to S09, S12 of cases: what answers say, whole and in a stream."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.http_server import Gateway, running_gateway
from tests.fakes.pipeline import FakePipeline, Step, play
from tests.fakes.tiny_tokenizer import END_ID
from weir.core.request import FinishReason, TokenDelta, TokenLogprobs

HI = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def saying(model, text: str, *, ends: bool = True) -> FakePipeline:
    ids = model.tokenizer.encode(text)
    return FakePipeline(lambda prompt: play(ids, prompt, stop_token_id=END_ID if ends else None))


async def whole(gateway: Gateway, path: str, **fields: Any) -> dict[str, Any]:
    answer = await gateway.client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def streamed(gateway: Gateway, path: str, **fields: Any) -> dict[str, Any]:
    """The answer that the chunks of a stream add up to."""
    fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    answer = await gateway.client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": None})
            choice["text"] += part.get("text", part.get("delta", {}).get("content", "")) or ""
            choice["token_ids"] += part.get("token_ids", [])
            choice["logprobs"] = _added(choice["logprobs"], part["logprobs"])
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if part.get(name) is not None:
                    assert name not in choice
                    choice[name] = part[name]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1]["usage"], "chunks": chunks}


def _added(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] if isinstance(first[name], list) else first[name] for name in first}


async def test_s04_usage_is_the_same_in_both_modes(model, models):
    async with running_gateway(saying(model, "Hello there world 9 DEF", ends=False), models) as gateway:
        for fields in ({}, {"stop": [" 9"]}, {"n": 2}, {"prompt": ["hi", "ho"], "n": 2}, {"max_tokens": 2}):
            asked = {"prompt": "hi", "max_tokens": 24, **fields}
            usage = (await whole(gateway, COMPLETIONS, **asked))["usage"]
            assert usage == (await streamed(gateway, COMPLETIONS, **asked))["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            prompts = [asked["prompt"]] if isinstance(asked["prompt"], str) else asked["prompt"]
            assert usage["prompt_tokens"] == 2 * len(prompts)
            a_choice = {"stop": 4, "max_tokens": 2}.get(next(iter(fields), ""), 6)
            assert usage["completion_tokens"] == a_choice * len(prompts) * asked.get("n", 1)


async def test_s05_streamed_characters_are_whole(model, models):
    text = "中国 é😀!"
    async with running_gateway(saying(model, text), models) as gateway:
        answer = await streamed(gateway, COMPLETIONS, prompt="hi", max_tokens=30)
        assert answer["choices"][0]["text"] == text
        parts = [choice["text"] for chunk in answer["chunks"] for choice in chunk["choices"]]
        assert parts == ["中国", " ", "é", "😀", "!", ""]
        assert (await whole(gateway, COMPLETIONS, prompt="hi", max_tokens=30))["choices"][0]["text"] == text
        cut = await whole(gateway, COMPLETIONS, prompt="hi", max_tokens=3)
        assert cut["choices"][0]["text"] == "中国 "


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "included"),
    [("FGH", "DE", "DEFGH"), ("EFG", "D", "DEFG"), ("M", "DEFGHIJKL", "DEFGHIJKLM"), ("DEFGHIJ", "", "DEFGHIJ")],
)
async def test_s06_s07_stop_strings_need_no_token_boundary(model, models, stop, text, included, include):
    fields = {"prompt": "ABC", "max_tokens": 20, "stop": [stop], "include_stop_str_in_output": include}
    async with running_gateway(saying(model, "DEFGHIJKLMNOP", ends=False), models) as gateway:
        for answer in (await whole(gateway, COMPLETIONS, **fields), await streamed(gateway, COMPLETIONS, **fields)):
            (choice,) = answer["choices"]
            assert choice["text"] == (included if include else text)
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] == stop


async def test_s08_impossible_log_probabilities_are_a_number(model, models):
    entry = TokenLogprobs(
        token_id=60,
        logprob=float("-inf"),
        rank=9,
        top_token_ids=(61, 62),
        top_logprobs=(0.0, float("-inf")),
    )

    def script(prompt) -> Sequence[Step]:
        (step,) = play([60], prompt)
        delta = TokenDelta(first_index=0, token_ids=(60,), logprobs=(entry,), finish_reason=FinishReason.LENGTH)
        return [[type(step[0])(choice_index=0, delta=delta)]]

    async with running_gateway(FakePipeline(script), models) as gateway:
        first = await gateway.client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 1, "logprobs": 2})
        second = await gateway.client.post(
            CHATS, json={**HI, "max_tokens": 1, "logprobs": True, "top_logprobs": 2, "stream": True}
        )
    for answer in (first, second):
        assert answer.status_code == 200
        assert "-9999.0" in answer.text
        assert not any(word in answer.text for word in ("NaN", "Infinity"))


@pytest.mark.parametrize("prompt", [["hi", "ho"], [[60, 61], [62]]])
async def test_s09_choice_k_of_prompt_i_has_index_i_n_plus_k(model, models, prompt):
    texts = {0: "Hello", 1: " there", 2: " world", 3: "DEF"}

    class Numbered(FakePipeline):
        def generate(self, request):
            self.script = _numbered(model, texts, len(self.prompts) * 2)
            return super().generate(request)

    async with running_gateway(Numbered(lambda _: []), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, prompt=prompt, n=2, max_tokens=4)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert {choice["index"]: choice["text"] for choice in answer["choices"]} == texts
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
        assert [prompt.request_id for prompt in gateway.pipeline.prompts] == [f"{answer['id']}-0", f"{answer['id']}-1"]
        gateway.pipeline.prompts.clear()
        answer = await streamed(gateway, COMPLETIONS, prompt=prompt, n=2, max_tokens=4)
        assert [choice["text"] for choice in answer["choices"]] == list(texts.values())
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])


def _numbered(model, texts: dict[int, str], first: int):
    def script(prompt) -> Sequence[Step]:
        steps: list[Step] = []
        for k in range(prompt.n):
            for news, *_ in play(model.tokenizer.encode(texts[first + k]), prompt):
                steps.append([type(news)(choice_index=k, delta=news.delta)])
        return steps

    return script


async def test_s12_null_everywhere_is_nothing_given(model, models):
    nulls = dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "stop", "seed", "logit_bias", "tools", "response_format", "n", "stream")
    )
    async with running_gateway(saying(model, "Hello"), models) as gateway:
        answer = await whole(gateway, CHATS, **HI, **nulls)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        await whole(gateway, COMPLETIONS, prompt="hi", max_tokens=None, model=None)
        assert gateway.pipeline.prompts[-1].sampling.max_tokens == 16


async def test_one_step_of_many_tokens_reads_like_many_steps(model, models):
    ids = model.tokenizer.encode("Hello there world")
    pipeline = FakePipeline(lambda prompt: play(ids, prompt, tokens_a_step=3))
    async with running_gateway(pipeline, models) as gateway:
        answer = await streamed(gateway, COMPLETIONS, prompt="hi", max_tokens=3, logprobs=1)
    assert answer["choices"][0]["text"] == "Hello there world"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 5, 11]
    assert len(answer["chunks"]) == 2


async def test_completion_log_probabilities_are_those_of_the_counted_tokens(model, models):
    fields = {"prompt": "hi", "max_tokens": 9, "logprobs": 2, "stop": ["world"]}
    async with running_gateway(saying(model, "Hello there world DEF"), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, **fields)
        again = await streamed(gateway, COMPLETIONS, **fields)
    (choice,) = answer["choices"]
    ids = model.tokenizer.encode("Hello there world")
    assert choice["text"] == "Hello there "
    assert choice["logprobs"] == {
        "tokens": ["Hello", " there", " world"],
        "token_logprobs": [-0.25, -0.25, -0.25],
        "top_logprobs": [
            {model.tokenizer.token_text(token_id): -0.25, model.tokenizer.token_text(token_id + 1): -0.5}
            for token_id in ids
        ],
        "text_offset": [0, 5, 11],
    }
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    assert again["choices"][0]["logprobs"] == choice["logprobs"]


async def test_chat_log_probabilities_have_bytes_and_alternatives(model, models):
    fields = {**HI, "logprobs": True, "top_logprobs": 2}
    async with running_gateway(saying(model, "é"), models) as gateway:
        answer = await whole(gateway, CHATS, **fields)
        again = await streamed(gateway, CHATS, **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert content[0]["bytes"] == [0xC3]
    assert content[0]["logprob"] == -0.25
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert again["choices"][0]["logprobs"]["content"] == content


async def test_echo_repeats_the_prompt_with_its_log_probabilities(model, models):
    fields = {"prompt": "Hello there", "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2}
    async with running_gateway(saying(model, " world DEF", ends=False), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, **fields)
        again = await streamed(gateway, COMPLETIONS, **fields)
    for choice in (*answer["choices"], *again["choices"]):
        assert choice["text"] == "Hello there world "
        assert choice["logprobs"]["tokens"] == ["Hello", " there", " world", " "]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 5, 11, 17]


async def test_prompt_log_probabilities_are_by_token_id(model, models):
    ids = model.tokenizer.encode("Hello there world")
    expected = [
        None,
        *({str(i): {"logprob": -0.25, "rank": 1, "decoded_token": model.tokenizer.token_text(i)}} for i in ids[1:]),
    ]
    async with running_gateway(saying(model, "DEF"), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, prompt="Hello there world", prompt_logprobs=1, n=2)
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected, expected]
        chat = await whole(gateway, CHATS, **HI, prompt_logprobs=0)
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_a_single_token_prompt_has_nothing_to_tell(model, models):
    async with running_gateway(saying(model, "DEF"), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, prompt=[60], prompt_logprobs=1, echo=True, logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] == [None]


async def test_token_ids_are_returned_on_request(model, models):
    fields = {"return_token_ids": True, "n": 2, "stop": [" there"]}
    ids = list(model.tokenizer.encode("Hello there"))
    async with running_gateway(saying(model, "Hello there world"), models) as gateway:
        answer = await whole(gateway, COMPLETIONS, prompt=[60, 61], **fields)
        again = await streamed(gateway, COMPLETIONS, prompt=[60, 61], **fields)
        for choice in (*answer["choices"], *again["choices"]):
            assert choice["token_ids"] == ids
            assert choice["prompt_token_ids"] == [60, 61]
        chat = await whole(gateway, CHATS, **HI, **fields)
        chunks = (await streamed(gateway, CHATS, **HI, **fields))["chunks"]
        assert [choice["token_ids"] for choice in chat["choices"]] == [ids, ids]
        assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
            chat["prompt_token_ids"]
        ]


async def test_special_tokens_are_text_only_if_wanted(model, models):
    ids = (*model.tokenizer.encode("Hello"), 1, *model.tokenizer.encode(" there"))
    async with running_gateway(FakePipeline(lambda prompt: play(ids, prompt)), models) as gateway:
        for skips, text in ((True, "Hello there"), (False, "Hello<|im_start|> there")):
            answer = await whole(gateway, COMPLETIONS, prompt="hi", max_tokens=3, skip_special_tokens=skips)
            assert answer["choices"][0]["text"] == text


async def test_what_was_asked_for_reaches_the_workers(model, models):
    fields = {
        "prompt": "hi", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "seed": 11, "max_tokens": 9, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [9, 8, 9], "logit_bias": {"60": -5}, "allowed_token_ids": [60, 61],
        "logprobs": 3, "n": 2,
    }  # fmt: skip
    async with running_gateway(saying(model, "Hello there world"), models) as gateway:
        await whole(gateway, COMPLETIONS, **fields)
        (prompt,) = gateway.pipeline.prompts
    sampling = prompt.sampling
    assert (prompt.n, sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2, 11, 9, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    assert penalties == (0.2, 0.3, 1.1)
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.logit_bias) == (True, (9, 8), ((60, -5.0),))
    assert (sampling.allowed_token_ids, sampling.logprobs, sampling.prompt_logprobs) == ((60, 61), 3, None)


async def test_choices_end_each_at_its_own_time(model, models):
    ids = model.tokenizer.encode("Hello there world")

    def script(prompt) -> Sequence[Step]:
        steps = [[news[k] for k in range(2)] for news in play(ids, prompt)]
        short = TokenDelta(first_index=1, token_ids=(END_ID,), finish_reason=FinishReason.STOP, stop_token_id=END_ID)
        return [steps[0], [type(steps[0][0])(choice_index=1, delta=short), steps[1][0]], [steps[2][0]]]

    async with running_gateway(FakePipeline(script), models) as gateway:
        for answer in (
            await whole(gateway, CHATS, **HI, n=2, max_tokens=3),
            await streamed(gateway, CHATS, **HI, n=2, max_tokens=3),
        ):
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
            assert answer["usage"]["completion_tokens"] == 5


async def test_64_streams_at_once_get_each_its_own_tokens(model, models):
    def script(prompt) -> Sequence[Step]:
        return play([60 + (prompt.prompt_token_ids[0] + step) % 200 for step in range(20)], prompt)

    async with running_gateway(FakePipeline(script), models) as gateway, asyncio.TaskGroup() as group:
        calls = [
            group.create_task(streamed(gateway, COMPLETIONS, prompt=[60 + k], max_tokens=20, return_token_ids=True))
            for k in range(64)
        ]
        for k, call in enumerate(calls):
            assert (await call)["choices"][0]["token_ids"] == [60 + (60 + k + step) % 200 for step in range(20)]
