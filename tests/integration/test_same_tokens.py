"""Disaggregated ids = the ids of one engine doing both, however the prompt is cut, cached, moved or recomputed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.worker_pair import WorkerPair, generate_alone, within
from tests.integration.answering import answer_in_a_burst
from tests.integration.engines import engine_of, prompt_of, real_pair
from weir.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 300)

# Block size on prefill, on decode, and tokens a step on prefill.
SHAPES = [(16, 16, 64), (1, 1, 64), (256, 256, 300), (16, 1, 17), (1, 16, 300), (256, 16, 33), (8, 32, 64), (64, 8, 16)]


async def check(pair: WorkerPair, expected: dict[int, list[int]], sampling: SamplingParams = GREEDY) -> None:
    """All prompts at once: each is batched with strangers."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            length: group.create_task(pair.generate(prompt_of(length, seed=length), sampling)) for length in expected
        }
    for length, task in tasks.items():
        _, (stream,) = task.result()
        assert stream.error is None
        assert stream.token_ids == expected[length], f"a prompt of {length} tokens gives other tokens"


async def answers(model_dir: Path, sampling: SamplingParams = GREEDY, **settings: Any) -> dict[int, list[int]]:
    async with engine_of(model_dir, max_num_batched_tokens=512, **settings) as engine:
        return {length: await generate_alone(engine, prompt_of(length, seed=length), sampling) for length in LENGTHS}


@pytest.mark.parametrize(("prefill_block", "decode_block", "chunk"), SHAPES)
async def test_at_every_block_size_and_chunk_hot_and_cold(
    tiny_model_dir: Path, prefill_block: int, decode_block: int, chunk: int
) -> None:
    expected = await answers(tiny_model_dir)
    async with real_pair(
        tiny_model_dir,
        prefill={"block_size": prefill_block, "max_num_batched_tokens": chunk},
        decode={"block_size": decode_block},
    ) as pair:
        await check(pair, expected)
        await pair.assert_at_rest()
        await check(pair, expected)  # now both prefix caches are hot
        await pair.assert_at_rest()
        assert pair.decode_engine.stats().num_prompt_tokens == 0, "decode computed a prompt"


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16", "int8"])
async def test_with_smaller_keys_and_values(tiny_model_dir: Path, kv_cache_dtype: str) -> None:
    smaller = {"kv_cache_dtype": kv_cache_dtype}
    expected = await answers(tiny_model_dir, **smaller)
    async with real_pair(tiny_model_dir, prefill=smaller, decode={"block_size": 8} | smaller) as pair:
        await check(pair, expected)
        await pair.assert_at_rest()


async def test_over_a_unix_socket(tiny_model_dir: Path, tmp_path: Path) -> None:
    expected = await answers(tiny_model_dir)
    async with real_pair(tiny_model_dir, listen=f"unix://{tmp_path / 'kv.sock'}") as pair:
        await check(pair, expected)
        await pair.assert_at_rest()


async def test_without_prefix_caches(tiny_model_dir: Path) -> None:
    expected = await answers(tiny_model_dir)
    off = {"enable_prefix_caching": False}
    async with real_pair(tiny_model_dir, prefill=off, decode=off) as pair:
        await check(pair, expected)
        await check(pair, expected)
        await pair.assert_at_rest()


async def test_sampled_tokens_depend_on_seed_choice_and_position_alone(tiny_model_dir: Path) -> None:
    prompt = prompt_of(40)
    async with engine_of(tiny_model_dir) as engine:
        expected = [await generate_alone(engine, prompt, SEEDED, choice_index=index) for index in range(3)]
    assert len({tuple(token_ids) for token_ids in expected}) == 3, "every choice is its own"
    async with real_pair(tiny_model_dir, decode={"block_size": 8}) as pair:
        _, streams = await pair.generate(prompt, SEEDED, n=3)
        assert [stream.token_ids for stream in streams] == expected
        for stream in streams:
            assert [logprobs.token_id for logprobs in stream.logprobs] == stream.token_ids
            assert all(len(logprobs.top_token_ids) == 2 for logprobs in stream.logprobs)
        await pair.assert_at_rest()


async def test_with_penalties_a_bias_and_stop_tokens(tiny_model_dir: Path) -> None:
    sampling = replace(
        GREEDY,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0),),
        min_tokens=3,
        stop_token_ids=tuple(range(100, 160)),
        max_tokens=30,
    )
    expected = await answers(tiny_model_dir, sampling)
    async with real_pair(tiny_model_dir) as pair:
        await check(pair, expected, sampling)
        await pair.assert_at_rest()


async def test_preempted_sequences_are_recomputed_to_the_same_tokens(tiny_model_dir: Path) -> None:
    sampling = replace(GREEDY, max_tokens=100)
    prompts = [prompt_of(33, seed=seed) for seed in range(6)]
    async with engine_of(tiny_model_dir) as engine:
        expected = [await generate_alone(engine, prompt, sampling) for prompt in prompts]
    async with real_pair(tiny_model_dir, decode={"num_blocks": 32}) as pair:  # six sequences grow to 54 blocks
        streams = await answer_in_a_burst(pair, prompts, sampling, timeout_s=60.0)
        assert [stream.token_ids for stream in streams] == expected
        assert pair.decode_engine.stats().num_preemptions > 0
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_sent", [0, 1, 5, 11])
async def test_a_later_epoch_continues_with_the_same_tokens(tiny_model_dir: Path, num_sent: int) -> None:
    prompt = prompt_of(50)
    async with engine_of(tiny_model_dir) as engine:
        expected = await generate_alone(engine, prompt, SEEDED)
    async with real_pair(tiny_model_dir, prefill={"max_num_batched_tokens": 20}) as pair:
        request, key = pair.request(prompt, SEEDED, epoch=1, resumed_output_token_ids=tuple(expected[:num_sent]))
        stream = pair.gateway.open(request, key, pair.source)
        stream.token_ids.extend(expected[:num_sent])
        result = await within(pair.start_prefill(request, key))
        if result.first_tokens[0].finish_reason is None:
            await within(stream.ended.wait())
            assert stream.token_ids == expected
        else:
            assert [*expected[:num_sent], result.first_tokens[0].token_id] == expected
            pair.gateway.cancel(stream)
        await pair.assert_at_rest()


async def test_the_prompts_log_probabilities_come_from_prefill(tiny_model_dir: Path) -> None:
    sampling = replace(GREEDY, prompt_logprobs=1)
    prompt = prompt_of(70)
    async with real_pair(tiny_model_dir, prefill={"max_num_batched_tokens": 32}) as pair:
        for _ in range(2):  # a hot cache must not hide them
            result, (stream,) = await pair.generate(prompt, sampling)
            assert [logprobs.token_id for logprobs in result.prompt_logprobs] == list(prompt[1:])
            assert stream.finish_reason is not None
        await pair.assert_at_rest()
