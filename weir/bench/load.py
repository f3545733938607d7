"""At which pace requests are sent: so many at a time, at given moments, or a burst among running streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from weir.bench.exchange import Exchange
from weir.core.deadline import Clock, Deadline

Perform = Callable[[Exchange], Awaitable[None]]


async def closed_loop(
    exchanges: Sequence[Exchange], perform: Perform, *, concurrency: int, until: Deadline, clock: Clock
) -> None:
    """Keep `concurrency` requests running; none is begun after `until`."""
    waiting = iter(exchanges)

    async def stream() -> None:
        for exchange in waiting:
            if until.is_past(clock):
                return
            await perform(exchange)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(exchanges))):
            group.create_task(stream())


async def open_loop(exchanges: Sequence[Exchange], perform: Perform, *, until: Deadline, clock: Clock) -> None:
    """Begin each request when it is due, whatever the others do; none after `until`."""
    started_s = clock()
    async with asyncio.TaskGroup() as group:
        for exchange in exchanges:
            # uvloop's timers count whole milliseconds, and so may be early.
            while (wait_s := started_s + exchange.plan.due_s - clock()) > 0 and not until.is_past(clock):  # noqa: ASYNC110
                await asyncio.sleep(min(wait_s, until.remaining_s(clock)))
            if until.is_past(clock):
                return
            group.create_task(_perform(perform, exchange))


async def burst_among(
    steady: Sequence[Exchange], burst: Sequence[Exchange], perform: Perform, *, until: Deadline, clock: Clock
) -> None:
    """Begin all of `steady` and, once each has had its awaited pieces of text, all of `burst`, unless after `until`."""
    async with asyncio.TaskGroup() as group:
        for exchange in steady:
            group.create_task(_perform(perform, exchange))
        for exchange in steady:
            await exchange.reached.wait()
        if until.is_past(clock):
            return
        for exchange in burst:
            group.create_task(_perform(perform, exchange))


async def _perform(perform: Perform, exchange: Exchange) -> None:
    await perform(exchange)
