"""Greedy ids of the default model through two services = those of one engine = transformers', however they come about.

Ties, see `GreedyJudge`, are the only exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.reference_model import load_prepared_reference
from tests.integration.answering import Prompt, answer_alone, answer_in_a_burst, answer_split
from tests.integration.engines import engine_of, real_pair
from tests.integration.equality_case import BLOCK_SIZES, EqualityCase, pairwise_cases, product_cases
from tests.integration.greedy_judge import GreedyJudge
from tests.integration.prompt_set import ALL_LENGTHS, LONG_LENGTHS, SHORT_LENGTHS, PromptSet
from weir.core.request import SamplingParams, TokenLogprobs

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
CHUNK = 48
MAX_LOGPROB_DIFFERENCE = 1e-3
TIMEOUT_S = 900.0
PATIENT = {
    "lease_s": TIMEOUT_S,
    "max_queue_s": TIMEOUT_S,
    "wait_s": TIMEOUT_S,
}
"""Time is not what is tested here."""


@pytest.fixture(scope="module")
def judge(real_model_dir: Path) -> GreedyJudge:
    return GreedyJudge(load_prepared_reference(real_model_dir))


@pytest.fixture(scope="module")
def prompt_set(real_model_dir: Path) -> PromptSet:
    return PromptSet(real_model_dir)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def roomy(prompts: Sequence[Prompt], block_size: int, *, chunk: int | None = None) -> dict[str, Any]:
    """Settings of an engine whose pool holds every prompt and its answer, and as much again for what is cached."""
    lengths = [len(prompt) + NUM_TOKENS for prompt in prompts]
    return {
        "block_size": block_size,
        "num_blocks": 2 * sum(blocks_for(length, block_size) for length in lengths),
        "max_model_len": max(lengths),
        "max_num_batched_tokens": chunk or max(max(lengths), 256),
        "max_num_seqs": min(64, chunk or 64),
        "num_threads": 2,
    }


def tight(prompts: Sequence[Prompt], block_size: int) -> dict[str, Any]:
    """The same with a pool that every prompt fits into, and of what their answers need beyond that next to nothing."""
    num_claimed = sum(blocks_for(len(prompt) + 1, block_size) for prompt in prompts)
    watermark = max(1, num_claimed // 99)
    return roomy(prompts, block_size) | {"num_blocks": num_claimed + watermark}


async def check_case(
    model_dir: Path, judge: GreedyJudge, prompts: Sequence[Prompt], case: EqualityCase, **options: Any
) -> None:
    """Every round of the case: all prompts at once, each judged alone, and both workers at rest after it."""
    prefill = roomy(prompts, case.prefill_block, chunk=CHUNK if case.is_chunked else None)
    decode = (tight if case.is_preempted else roomy)(prompts, case.decode_block)
    async with real_pair(model_dir, prefill=prefill, decode=decode, **PATIENT, **options) as pair:
        for cache in case.caches:
            if cache in ("cold", "decode hot"):
                assert await pair.prefill_engine.reset_prefix_cache()
            if cache in ("cold", "prefill hot"):
                assert await pair.decode_engine.reset_prefix_cache()
            num_hits = pair.prefill_engine.stats().prefix_cache_hits
            num_preemptions = pair.decode_engine.stats().num_preemptions
            if case.is_preempted:
                streams = await answer_in_a_burst(pair, prompts, GREEDY, timeout_s=TIMEOUT_S)
            else:
                streams = await answer_split(pair, prompts, [GREEDY] * len(prompts))
            for prompt, stream in zip(prompts, streams, strict=True):
                assert len(stream.token_ids) == NUM_TOKENS
                judge.check(prompt, stream.token_ids, f"{case}, {cache}")
            await pair.assert_at_rest()
            num_hits = pair.prefill_engine.stats().prefix_cache_hits - num_hits
            assert num_hits == sum(num_cached_tokens(prompt, case.prefill_block, cache) for prompt in prompts)
            num_preemptions = pair.decode_engine.stats().num_preemptions - num_preemptions
            assert (num_preemptions > 0) is case.is_preempted


def assert_same_logprobs(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=MAX_LOGPROB_DIFFERENCE)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=MAX_LOGPROB_DIFFERENCE)


def num_cached_tokens(prompt: Prompt, block_size: int, cache: str) -> int:
    """What the prefill worker finds: full blocks, and never the last token, whose logits choose the next one."""
    return 0 if cache in ("cold", "decode hot") else (len(prompt) - 1) // block_size * block_size


@pytest.mark.parametrize("case", pairwise_cases(), ids=str)
async def test_every_pair_of_circumstances(
    real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet, case: EqualityCase
) -> None:
    await check_case(real_model_dir, judge, prompt_set.of(SHORT_LENGTHS), case)


async def test_long_prompts(real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet) -> None:
    case = EqualityCase(
        prefill_block=16, decode_block=256, caches=("cold", "hot"), is_chunked=False, is_preempted=False
    )
    await check_case(real_model_dir, judge, prompt_set.of(LONG_LENGTHS), case)


@pytest.mark.full
@pytest.mark.parametrize("case", product_cases(), ids=str)
async def test_the_whole_product(
    real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet, case: EqualityCase
) -> None:
    await check_case(real_model_dir, judge, prompt_set.of(ALL_LENGTHS), case)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_one_engine_doing_both(
    real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet, block_size: int
) -> None:
    prompts = prompt_set.of(SHORT_LENGTHS)
    async with engine_of(real_model_dir, **roomy(prompts, block_size, chunk=CHUNK)) as engine:
        for cache in ("cold", "hot"):
            answers = await answer_alone(engine, prompts, GREEDY, timeout_s=TIMEOUT_S)
            for prompt, (token_ids, _) in zip(prompts, answers, strict=True):
                judge.check(prompt, token_ids, f"one engine, blocks of {block_size}, {cache}")


def test_the_judge_follows_transformers_own_loop(
    real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet
) -> None:
    model = load_prepared_reference(real_model_dir)
    for prompt in prompt_set.of((33, 100)):
        input_ids = torch.tensor([prompt])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
        )[0, len(prompt) :].tolist()
        judge.check(prompt, output, "transformers")
        with pytest.raises(AssertionError, match="better by"):
            judge.check(prompt, [*output[:5], output[5] + 1, *output[6:]], "a wrong token")


async def test_64_streams_of_mixed_length_equal_their_solo_runs(
    real_model_dir: Path, judge: GreedyJudge, prompt_set: PromptSet
) -> None:
    prompts = prompt_set.of([1 + index * index * 7 % 97 for index in range(64)])
    samplings = [replace(GREEDY, max_tokens=2 + index * 5 % 13) for index in range(64)]
    prefill, decode = roomy(prompts, 16), roomy(prompts, 16)
    longest = {"max_model_len": max(map(len, prompts)) + 32}
    async with real_pair(real_model_dir, prefill=prefill | longest, decode=decode | longest, **PATIENT) as pair:
        streams = await answer_split(pair, prompts, samplings)
        for prompt, sampling, stream in zip(prompts, samplings, streams, strict=True):
            assert len(stream.token_ids) == sampling.max_tokens
            judge.check(prompt, stream.token_ids, "one of 64")
        await pair.assert_at_rest()


async def test_seeded_choices_come_from_one_prefill_and_equal_one_engines(
    real_model_dir: Path, prompt_set: PromptSet
) -> None:
    prompt = prompt_set.of((100, 130))[1]
    num_choices = 4
    settings = roomy([prompt] * num_choices, 16)
    async with real_pair(real_model_dir, prefill=settings, decode=settings, **PATIENT) as pair:
        result, streams = await pair.generate(prompt, SEEDED, n=num_choices)
        assert len(result.first_tokens) == num_choices
        assert pair.prefill_engine.stats().num_prompt_tokens == len(prompt), "computed once for all choices"
        assert pair.decode_engine.stats().num_prompt_tokens == 0
        await pair.assert_at_rest()
    assert len({tuple(stream.token_ids) for stream in streams}) == num_choices, "every choice is its own"
    async with engine_of(real_model_dir, **settings) as engine:
        for index, stream in enumerate(streams):
            ((token_ids, logprobs),) = await answer_alone(
                engine, [prompt], SEEDED, choice_index=index, timeout_s=TIMEOUT_S
            )
            assert stream.token_ids == token_ids
            assert_same_logprobs(stream.logprobs, logprobs)


async def test_log_probabilities_equal_one_engines(real_model_dir: Path, prompt_set: PromptSet) -> None:
    prompts = prompt_set.of((5, 64, 150))
    sampling = replace(GREEDY, logprobs=5)
    settings = roomy(prompts, 16)
    async with engine_of(real_model_dir, **settings) as engine:
        answers = await answer_alone(engine, prompts, sampling, timeout_s=TIMEOUT_S)
    chunked = roomy(prompts, 1, chunk=CHUNK)
    async with real_pair(real_model_dir, prefill=chunked, decode=settings, **PATIENT) as pair:
        streams = await answer_split(pair, prompts, [sampling] * len(prompts))
    for stream, (token_ids, logprobs) in zip(streams, answers, strict=True):
        assert stream.token_ids == token_ids
        assert len(logprobs) == len(token_ids)
        assert_same_logprobs(stream.logprobs, logprobs)
