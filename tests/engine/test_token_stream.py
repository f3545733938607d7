"""TokenStream: merges what was not read, and is final when closed or told to forget."""

from __future__ import annotations

import asyncio

from weir.core.errors import HopFailedError
from weir.core.request import FinishReason, TokenDelta, TokenLogprobs
from weir.engine.token_stream import SequenceNews, TokenStream


def token(name: str, index: int, finish: FinishReason | None = None) -> SequenceNews:
    delta = TokenDelta(
        first_index=index,
        token_ids=(100 + index,),
        logprobs=(TokenLogprobs(token_id=100 + index, logprob=-1.0, rank=1),),
        finish_reason=finish,
        num_cached_tokens=16,
    )
    return SequenceNews(sequence_id=name, delta=delta)


def open_stream() -> TokenStream:
    return TokenStream(lambda stream: None)


async def test_unread_news_of_a_sequence_become_one() -> None:
    stream = open_stream()
    for news in (token("a", 3), token("b", 0), token("a", 4), token("a", 5, FinishReason.STOP)):
        stream.put(news)
    first, second = await stream.read()
    assert first.delta is not None
    assert first.sequence_id == "a"
    assert (first.delta.first_index, first.delta.token_ids) == (3, (103, 104, 105))
    assert len(first.delta.logprobs) == 3
    assert (first.delta.finish_reason, first.delta.num_cached_tokens, first.is_last) == (FinishReason.STOP, 16, True)
    assert second == token("b", 0)


async def test_error_after_tokens_keeps_the_tokens() -> None:
    stream = open_stream()
    error = HopFailedError("broken")
    stream.put(token("a", 0))
    stream.put(SequenceNews(sequence_id="a", error=error))
    (news,) = await stream.read()
    assert news.error is error
    assert news.delta == token("a", 0).delta


async def test_read_waits_for_news() -> None:
    stream = open_stream()
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(stream.read())
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(token("a", 0))
    assert reader.result() == (token("a", 0),)


async def test_forgotten_news_neither_arrive_nor_wake_the_reader() -> None:
    stream = open_stream()
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(stream.read())
        await asyncio.sleep(0)
        stream.put(token("a", 0))
        stream.forget("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(token("b", 0))
    assert reader.result() == (token("b", 0),)


async def test_close_wakes_the_reader_and_happens_once() -> None:
    closed: list[TokenStream] = []
    stream = TokenStream(closed.append)
    stream.put(token("a", 0))
    stream.close()
    stream.close()
    stream.put(token("a", 1))
    assert await stream.read() == ()
    assert closed == [stream]
