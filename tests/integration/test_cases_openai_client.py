"""The official client, unchanged, over a real socket, on the real model through both services."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from tests.integration.real_cluster import HI, HI_ANSWER, RealCluster

P_ALPHA = "Here is the English alphabet: ABC"


@pytest.fixture
async def client(real: RealCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{real.cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def model(client: AsyncOpenAI) -> str:
    (model,) = [model.id async for model in client.models.list()]
    assert (await client.models.retrieve(model)).id == model
    return model


async def test_chat(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=HI, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (HI_ANSWER, "stop")
    assert "".join(token.token for token in choice.logprobs.content).startswith(HI_ANSWER)
    assert answer.usage.prompt_tokens == 31
    assert answer.usage.total_tokens == 31 + answer.usage.completion_tokens


async def test_chat_stream(client: AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=HI, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HI_ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens == 31


async def test_completion_whole_and_streamed_past_keep_alives(client: AsyncOpenAI, model: str) -> None:
    answer = await client.completions.create(model=model, prompt=P_ALPHA, temperature=0, max_tokens=20, stop=["M"])
    assert answer.choices[0].text == "DEFGHIJKL"
    prompt = [400 + index % 40 for index in range(700)]
    stream = await client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == "length"


async def test_a_stream_may_be_left(client: AsyncOpenAI, model: str, real: RealCluster) -> None:
    stream = await client.completions.create(
        model=model, prompt=P_ALPHA, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await real.at_rest()


async def test_errors_are_the_clients_own_classes(client: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="nobody", prompt="hi")
    assert missing.value.code == "model_not_found"
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=model, messages=HI, max_tokens=9000, stream=stream)
        assert wrong.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as odd:
        await client.chat.completions.create(model=model, messages=HI, temperature=-1)
    assert odd.value.param == "temperature"
