"""The official OpenAI client, unchanged, over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI

from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore
from tests.fakes.http_server import running_gateway
from tests.fakes.pipeline import FakePipeline, play
from weir.core.errors import WorkerLostError

MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def connected(pipeline: FakePipeline, models: ModelStore) -> AsyncIterator[AsyncOpenAI]:
    settings = HttpSettings(api_keys=("sk-weir",), keep_alive_s=0.01)
    async with running_gateway(pipeline, models, http=settings) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-weir", max_retries=0) as client:
            yield client


@pytest.fixture
def pipeline(model) -> FakePipeline:
    ids = model.tokenizer.encode("Hello there 中国")
    return FakePipeline(lambda prompt: play(ids, prompt, stop_token_id=2))


async def test_chat_whole(pipeline, models):
    async with connected(pipeline, models) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_completion_tokens=20, seed=1
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello there 中国"] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs.content[0].token == "Hello"
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        again = await client.chat.completions.create(
            model="tiny", messages=[*MESSAGES, answer.choices[0].message, *MESSAGES]
        )
        assert again.choices[0].message.content == "Hello there 中国"


async def test_chat_stream(pipeline, models):
    async with connected(pipeline, models) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there 中国"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 5


async def test_chat_stream_helper_adds_the_chunks_up(pipeline, models):
    async with connected(pipeline, models) as client:
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello there 中国"


async def test_completions_whole_and_in_a_stream(pipeline, models):
    async with connected(pipeline, models) as client:
        answer = await client.completions.create(model="tiny", prompt=["hi", "ho"], logprobs=2, max_tokens=9, echo=True)
        assert [choice.text for choice in answer.choices] == ["hiHello there 中国", "hoHello there 中国"]
        assert answer.choices[0].logprobs.tokens[:3] == ["h", "i", "Hello"]
        text = ""
        async for chunk in await client.completions.create(model="tiny", prompt="hi", stream=True):
            text += chunk.choices[0].text
        assert text == "Hello there 中国"


async def test_models(pipeline, models):
    async with connected(pipeline, models) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_have_the_classes_that_clients_catch(pipeline, models):
    async with connected(pipeline, models) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.completions.create(model="tiny", prompt=[60] * 300, stream=True)


async def test_a_failure_in_mid_stream_is_raised_by_the_client(model, models):
    ids = model.tokenizer.encode("Hello there")
    lost = WorkerLostError("the decode worker is gone", hop="decode")
    async with connected(FakePipeline(lambda prompt: [play(ids, prompt)[0], lost]), models) as client:
        texts: list[str] = []

        async def read_all() -> None:
            async for chunk in await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                texts.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="decode worker is gone"):
            await read_all()
        assert "".join(texts) == "Hello"
