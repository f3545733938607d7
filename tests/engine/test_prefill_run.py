"""PrefillRun: the newest progress, the end, and leaving early."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from weir.core.errors import DeadlineExceededError
from weir.core.request import FirstToken
from weir.engine.prefill_run import PrefillProgress, PrefillRun


def progress(num_computed_tokens: int, *, is_last: bool = False) -> PrefillProgress:
    return PrefillProgress(
        num_computed_tokens=num_computed_tokens,
        num_cached_tokens=0,
        block_ids=(1, 2),
        first_tokens=(FirstToken(choice_index=0, token_id=5),) if is_last else None,
        queue_s=0.0,
        prefill_s=0.0,
    )


async def test_slow_reader_sees_the_newest_only() -> None:
    run = PrefillRun(lambda: None)
    for count in (4, 8, 12):
        run.put(progress(count))
    assert (await anext(run)).num_computed_tokens == 12
    run.put(progress(16, is_last=True))
    assert [item.num_computed_tokens async for item in run] == [16]


async def test_closing_after_the_end_aborts_nothing() -> None:
    left: list[str] = []
    async with aclosing(PrefillRun(lambda: left.append("closed"))) as run:
        run.put(progress(16, is_last=True))
        assert [item.num_computed_tokens async for item in run] == [16]
    assert left == []


async def test_closing_before_the_end_aborts_once() -> None:
    left: list[str] = []
    run = PrefillRun(lambda: left.append("closed"))
    run.put(progress(4))
    await run.aclose()
    await run.aclose()
    run.put(progress(8))
    assert left == ["closed"]
    assert [item async for item in run] == []


async def test_cancelling_the_reader_aborts() -> None:
    left: list[str] = []
    run = PrefillRun(lambda: left.append("closed"))
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(anext(run))
        await asyncio.sleep(0)
        reader.cancel()
    assert left == ["closed"]


async def test_error_is_raised_and_ends_the_run() -> None:
    run = PrefillRun(lambda: None)
    run.put(progress(4))
    run.put(DeadlineExceededError("late"))
    with pytest.raises(DeadlineExceededError):
        await anext(run)
    assert [item async for item in run] == []
