"""Writes that nobody waits for: bounded, coalesced by key, sent in pipelines by an owned task.

Knows nothing of what is written. Losing Redis costs the oldest writes once the bound is reached, and counts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Generic, Self, TypeVar

from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.wakeup import Wakeup
from weir.core.errors import UnavailableError

logger = logging.getLogger(__name__)

BATCH_SIZE = 256
RETRY_PAUSE_S = 0.05
EXIT_TIMEOUT_S = 0.5

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteQueueStats:
    """Counts since the start.

    Attributes:
        num_pending: not acknowledged by Redis yet.
        num_written: accepted.
        num_stale: refused by the rule of their script, because Redis already knew better.
        num_refused: refused by Redis itself (out of memory, no permission).
        num_dropped: given up because the queue was full.
    """

    num_pending: int
    num_written: int
    num_stale: int
    num_refused: int
    num_dropped: int


class WriteQueue(Generic[_Value]):
    """An async context manager; leaving it sends what is pending if Redis answers within `EXIT_TIMEOUT_S`.

    Args:
        encode: the script calls that write a value, made when it is sent; none to skip it. A call that replies 0 found
            something newer.
        should_replace: `(pending, new)` says whether the new value takes the place of a pending one of its key.
        max_pending: beyond it the value that has waited longest is dropped.
    """

    def __init__(
        self,
        connection: RedisConnection,
        encode: Callable[[_Value], tuple[ScriptCall, ...]],
        *,
        should_replace: Callable[[_Value, _Value], bool] = lambda pending, new: True,
        max_pending: int = 10_000,
    ) -> None:
        self._connection = connection
        self._encode = encode
        self._should_replace = should_replace
        self._max_pending = max_pending
        self._pending: dict[Hashable, _Value] = {}
        self._in_flight: dict[Hashable, _Value] = {}
        self._wakeup = Wakeup()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = OwnedTasks()
        self._num_written = self._num_stale = self._num_refused = self._num_dropped = 0

    @property
    def stats(self) -> WriteQueueStats:
        return WriteQueueStats(
            num_pending=len(self._pending) + len(self._in_flight),
            num_written=self._num_written,
            num_stale=self._num_stale,
            num_refused=self._num_refused,
            num_dropped=self._num_dropped,
        )

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._send_batches())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._connection.is_up:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self.wait_until_sent()
        except TimeoutError:
            logger.warning("left %d writes to redis unsent", self.stats.num_pending)
        finally:
            await self._tasks.__aexit__(kind, error, traceback)

    def put(self, key: Hashable, value: _Value) -> None:
        """Queue a write; never waits."""
        pending = self._pending.get(key)
        if pending is not None and not self._should_replace(pending, value):
            self._num_stale += 1
            return
        if pending is None and len(self._pending) >= self._max_pending:
            del self._pending[next(iter(self._pending))]
            self._num_dropped += 1
        self._pending[key] = value
        self._idle.clear()
        self._wakeup.set()

    async def wait_until_sent(self) -> None:
        """Until nothing is pending, however long Redis is away; give it a time-out."""
        await self._idle.wait()

    async def _send_batches(self) -> None:
        while True:
            await self._wakeup.wait()
            while self._pending:
                await self._connection.link.wait_until_up()
                await self._send_batch()
            self._idle.set()

    async def _send_batch(self) -> None:
        """The values that have waited longest, in one round trip; they go back to the queue if Redis is away."""
        keys = [key for key, _ in zip(self._pending, range(BATCH_SIZE), strict=False)]
        self._in_flight = {key: self._pending.pop(key) for key in keys}
        calls = [call for value in self._in_flight.values() for call in self._encode(value)]
        try:
            replies = await self._connection.run_scripts(calls) if calls else []
        except UnavailableError:
            self._pending = self._merge_back()
            self._in_flight = {}
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        self._in_flight = {}
        refusals = [reply for reply in replies if isinstance(reply, UnavailableError)]
        if refusals:
            logger.warning("%d writes refused: %s", len(refusals), refusals[0].message)
        num_stale = replies.count(0)
        self._num_refused += len(refusals)
        self._num_stale += num_stale
        self._num_written += len(replies) - len(refusals) - num_stale

    def _merge_back(self) -> dict[Hashable, _Value]:
        """Unsent values in front of those that came since, as if they had never left; within the bound."""
        merged = dict(self._in_flight)
        for key, value in self._pending.items():
            if key not in merged or self._should_replace(merged[key], value):
                merged[key] = value
        num_excess = max(0, len(merged) - self._max_pending)
        self._num_dropped += num_excess
        return dict(islice(merged.items(), num_excess, None))
