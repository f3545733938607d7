"""Rows S11, S24 and S26 of the cases on the real model through both services: what is cached changes no token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.real_cluster import HI, RealCluster

BLOCK_SIZE = 16
LONG = [260 + index % 50 for index in range(700)]


def num_cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_s11_s24_three_calls_in_a_row_have_the_same_tokens(real: RealCluster) -> None:
    for num_repeats, num_prompt in ((1, 31), (2, 32), (3, 33)):
        messages = [{"role": "user", "content": " ".join(["hi"] * num_repeats)}]
        body = {"max_tokens": 8, "return_token_ids": True, "cache_salt": f"s24-{num_prompt}"}
        answers = [await real.chat(messages, **body) for _ in range(3)]
        assert {answer["usage"]["prompt_tokens"] for answer in answers} == {num_prompt}
        ids = [answer["choices"][0]["token_ids"] for answer in answers]
        assert ids[1:] == ids[:1] * 2
        assert num_cached(answers[0]) == 0
        for answer in answers[1:]:
            assert num_cached(answer) == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
        grown = [*messages, {"role": "assistant", "content": answers[0]["choices"][0]["message"]["content"]}, *HI]
        hot = await real.chat(grown, **body)
        cold = await real.chat(grown, **body | {"cache_salt": f"s24-{num_prompt}-cold"})
        assert num_cached(hot) >= num_cached(answers[1])
        assert hot["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32])
async def test_s24_a_prompt_that_ends_with_a_block_computes_its_last_token(real: RealCluster, num_tokens: int) -> None:
    body = {"max_tokens": 6, "return_token_ids": True, "cache_salt": "s24"}
    answers = [await real.completion([260] * num_tokens, **body) for _ in range(3)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    assert all(num_cached(answer) < num_tokens for answer in answers)


async def test_s11_s26_neither_chunks_nor_hits_nor_neighbours_change_a_long_prompts_answer(real: RealCluster) -> None:
    body = {"max_tokens": 10, "logprobs": 5, "return_token_ids": True}
    cold = await real.completion(LONG, **body, cache_salt="cold")
    assert num_cached(cold) == 0
    hot = await real.completion(LONG, **body, cache_salt="cold")
    assert num_cached(hot) == len(LONG) // BLOCK_SIZE * BLOCK_SIZE
    await real.completion(LONG[:150], max_tokens=1, cache_salt="half")
    chunked_elsewhere = await real.completion(LONG, **body, cache_salt="half")
    assert num_cached(chunked_elsewhere) == 144
    async with asyncio.TaskGroup() as group:
        neighbours = [group.create_task(real.completion([300 + i], max_tokens=40, ignore_eos=True)) for i in range(4)]
        crowded = await real.completion(LONG, **body, cache_salt="crowded")
    assert all(task.result()["usage"]["completion_tokens"] == 40 for task in neighbours)
    expected = cold["choices"][0]
    for answer in (hot, chunked_elsewhere, crowded):
        choice = answer["choices"][0]
        assert choice["token_ids"] == expected["token_ids"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.full
async def test_s11_a_prompt_of_1500_tokens_answers_alike_three_times(real: RealCluster) -> None:
    prompt = [260 + index % 50 for index in range(1500)]
    body = {"max_tokens": 20, "return_token_ids": True, "cache_salt": "s11"}
    answers = [await real.completion(prompt, **body) for _ in range(3)]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    assert [num_cached(answer) for answer in answers] == [0, 1488, 1488]


async def test_workers_tell_boards_how_their_cache_is_configured(real: RealCluster) -> None:
    for worker in real.workers.values():
        assert worker.metrics()["vllm:cache_config_info"] == 1
