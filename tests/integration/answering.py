"""Brings many prompts through a pair of workers, or through one engine, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from tests.fakes.worker_pair import Stream, WorkerPair, within
from weir.core.request import RequestId, SamplingParams, SequenceRequest, TokenLogprobs
from weir.engine.async_engine import AsyncEngine
from weir.engine.scheduler import Schedule

Prompt = tuple[int, ...]


async def answer_split(
    pair: WorkerPair, prompts: Sequence[Prompt], samplings: Sequence[SamplingParams]
) -> list[Stream]:
    """Each prompt opened on both workers at once, as the gateway does."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(pair.generate(prompt, sampling))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    streams = [stream for task in tasks for stream in task.result()[1]]
    return [_ended_well(stream) for stream in streams]


async def answer_in_a_burst(
    pair: WorkerPair, prompts: Sequence[Prompt], sampling: SamplingParams, *, timeout_s: float
) -> list[Stream]:
    """All prompts computed and held before the first is fetched, and no token decoded before the last was."""
    opened = [pair.request(prompt, sampling) for prompt in prompts]
    async with asyncio.TaskGroup() as group:
        for request, key in opened:
            group.create_task(within(pair.start_prefill(request, key), timeout_s))
    with _decode_waits_for(pair.decode_engine, len(prompts)):
        streams = [pair.gateway.open(request, key, pair.source) for request, key in opened]
        for stream in streams:
            await within(stream.ended.wait(), timeout_s)
    return [_ended_well(stream) for stream in streams]


@contextmanager
def _decode_waits_for(engine: AsyncEngine, num_sequences: int) -> Iterator[None]:
    """The engine schedules nothing until so many sequences run."""
    scheduler = engine._thread.engine._scheduler
    schedule = scheduler.schedule
    is_complete = False

    def schedule_when_complete() -> Schedule:
        nonlocal is_complete
        is_complete = is_complete or scheduler.num_running == num_sequences
        return schedule() if is_complete else Schedule()

    with patch.object(scheduler, "schedule", schedule_when_complete):
        yield


async def answer_alone(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    choice_index: int = 0,
    timeout_s: float,
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Tokens and log-probabilities of one engine that does both."""
    stream = engine.open_stream()
    try:
        answers: dict[str, tuple[list[int], list[TokenLogprobs]]] = {}
        for index, prompt in enumerate(prompts):
            request = SequenceRequest(
                request_id=RequestId(str(index)),
                sequence_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling,
                choice_index=choice_index,
            )
            answers[request.sequence_id] = ([], [])
            await engine.submit(request, stream)
        num_open = len(prompts)
        while num_open:
            for news in await within(stream.read(), timeout_s):
                assert news.error is None, news.error
                if news.delta is not None:
                    token_ids, logprobs = answers[news.sequence_id]
                    token_ids.extend(news.delta.token_ids)
                    logprobs.extend(news.delta.logprobs)
                num_open -= news.is_last
        return list(answers.values())
    finally:
        stream.close()


def _ended_well(stream: Stream) -> Stream:
    assert stream.error is None, stream.error
    assert stream.denied is None, stream.denied
    assert stream.finish_reason is not None
    return stream
