"""The laws of the buffer between the pipeline and the reader of one prompt."""

from __future__ import annotations

import asyncio

import pytest

from gateway.generation_stream import ChoiceNews, GenerationStream
from weir.core.errors import HopFailedError, RequestCancelledError
from weir.core.request import FinishReason, TokenDelta, TokenLogprobs


def news(choice: int, first_index: int, *token_ids: int, finish: FinishReason | None = None) -> ChoiceNews:
    logprobs = tuple(TokenLogprobs(token_id=token_id, logprob=-1.0, rank=1) for token_id in token_ids)
    delta = TokenDelta(first_index=first_index, token_ids=token_ids, logprobs=logprobs, finish_reason=finish)
    return ChoiceNews(choice_index=choice, delta=delta)


def stream(num_choices: int = 1, *, max_buffered_tokens: int = 100) -> tuple[GenerationStream, list[int]]:
    finished: list[int] = []
    return (
        GenerationStream(num_choices, max_buffered_tokens=max_buffered_tokens, on_finish=finished.append),
        finished,
    )


async def test_what_was_not_read_is_one_news_a_choice() -> None:
    buffer, _ = stream(2)
    buffer.put(news(1, 0, 7))
    buffer.put(news(0, 0, 5))
    buffer.put(news(1, 1, 8, 9, finish=FinishReason.STOP))
    first, second = await buffer.read()
    assert (first.choice_index, first.delta.token_ids, first.delta.finish_reason) == (1, (7, 8, 9), FinishReason.STOP)
    assert [each.token_id for each in first.delta.logprobs] == [7, 8, 9]
    assert (second.choice_index, second.delta.token_ids) == (0, (5,))


async def test_a_waiting_reader_is_woken_by_the_next_news() -> None:
    buffer, _ = stream()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(buffer.read())
        await asyncio.sleep(0)
        buffer.put(news(0, 0, 7))
    assert reading.result()[0].delta.token_ids == (7,)


async def test_it_ends_when_every_choice_has_ended() -> None:
    buffer, _ = stream(2)
    buffer.put(news(0, 0, 7, finish=FinishReason.STOP))
    buffer.put(news(1, 0, 8, finish=FinishReason.LENGTH))
    assert len(await buffer.read()) == 2
    assert await buffer.read() == ()
    assert await buffer.read() == ()


async def test_an_error_comes_after_what_came_before_it_and_stays() -> None:
    buffer, _ = stream()
    buffer.put(news(0, 0, 7))
    buffer.fail(HopFailedError("first", hop="decode"))
    buffer.fail(HopFailedError("second", hop="decode"))
    buffer.put(news(0, 1, 8))
    assert (await buffer.read())[0].delta.token_ids == (7,)
    for _ in range(2):
        with pytest.raises(HopFailedError, match="first"):
            await buffer.read()


async def test_an_error_after_the_end_is_none() -> None:
    buffer, _ = stream()
    buffer.put(news(0, 0, 7, finish=FinishReason.STOP))
    buffer.fail(HopFailedError("late", hop="decode"))
    assert len(await buffer.read()) == 1
    assert await buffer.read() == ()


async def test_a_choice_that_its_reader_finishes_is_told_once_and_silent_from_then_on() -> None:
    buffer, finished = stream(2)
    buffer.put(news(0, 0, 7))
    buffer.finish_choice(0)
    buffer.finish_choice(0)
    buffer.put(news(0, 1, 8))
    buffer.put(news(1, 0, 9, finish=FinishReason.STOP))
    assert finished == [0]
    assert [each.choice_index for each in await buffer.read()] == [1]
    assert await buffer.read() == ()


async def test_the_buffer_is_bounded_in_tokens_and_reading_makes_room() -> None:
    buffer, _ = stream(max_buffered_tokens=3)
    buffer.put(news(0, 0, 1, 2, 3))
    await buffer.read()
    buffer.put(news(0, 3, 4, 5, 6))
    with pytest.raises(RequestCancelledError):
        buffer.put(news(0, 6, 7))


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    buffer, _ = stream()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(buffer.read())
        await asyncio.sleep(0)
        reading.cancel()
    buffer.put(news(0, 0, 7))
    assert (await buffer.read())[0].delta.token_ids == (7,)
