"""How many requests may be in the system: a bounded number run, a bounded number wait, the rest is told when to come
back.

The wait is in order of priority, and of arrival within one priority; nobody overtakes the first of the queue, however
little they need. It knows no worker and no HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from weir.core.deadline import Clock
from weir.core.errors import OverloadedError, UnavailableError
from weir.runtime.tracing import tracer

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

HOLD_SMOOTHING = 0.1
"""Weight of the newest request in the mean time that a permit is held."""


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    order: int
    num_permits: int = field(compare=False)
    is_admitted: asyncio.Future[None] = field(compare=False)


class AdmissionController:
    """Hands out permits.

    Args:
        max_running: prompts that may run at once.
        max_waiting: requests that may wait for their permits.
        max_wait_s: how long one may wait.
        on_rejected: hears why one was refused: queue_full, wait_too_long or draining.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_wait_s: float,
        on_rejected: Callable[[str], None] = lambda reason: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._on_rejected = on_rejected
        self._clock = clock
        self._num_running = 0
        self._queue: list[_Waiter] = []
        self._num_waiting = 0
        self._order = count()
        self._mean_hold_s = MIN_RETRY_AFTER_S
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Permits that are held."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @asynccontextmanager
    async def admit(self, api_key: str = "", *, num_prompts: int = 1, priority: int = 0) -> AsyncIterator[None]:
        """Be in the system for as long as the body runs.

        Args:
            api_key: whose request it is.
            num_prompts: permits it takes; one that asks for more than there are takes all.

        Raises:
            OverloadedError: too many wait, or this one has waited too long; says when to come back.
            UnavailableError: the gateway drains.
        """
        num_permits = min(num_prompts, self._max_running)
        with tracer().start_as_current_span("serve"):
            with tracer().start_as_current_span("admission"):
                await self._acquire(num_permits, priority)
            started_s = self._clock()
            try:
                yield
            finally:
                self._mean_hold_s += HOLD_SMOOTHING * (self._clock() - started_s - self._mean_hold_s)
                self._release(num_permits)

    def refuse_new(self) -> None:
        """Start to drain: whoever is in, running or waiting, may finish; nobody else comes in."""
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        """Return once nobody runs and nobody waits."""
        await self._idle.wait()

    async def _acquire(self, num_permits: int, priority: int) -> None:
        if self._is_draining:
            self._on_rejected("draining")
            raise UnavailableError(
                "the gateway shuts down; it takes no new requests", hop="gateway", retry_after_s=MIN_RETRY_AFTER_S
            )
        if not self._num_waiting and self._num_running + num_permits <= self._max_running:
            self._take(num_permits)
            return
        if self._num_waiting >= self._max_waiting:
            self._on_rejected("queue_full")
            raise self._overloaded(f"{self._num_running} prompts run and {self._num_waiting} requests wait already")
        await self._wait(_Waiter(priority, next(self._order), num_permits, asyncio.get_running_loop().create_future()))

    async def _wait(self, waiter: _Waiter) -> None:
        heapq.heappush(self._queue, waiter)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiter.is_admitted
        except (TimeoutError, asyncio.CancelledError) as reason:
            if waiter.is_admitted.cancelled():
                self._num_waiting -= 1
                self._admit_first()
            else:
                self._release(waiter.num_permits)  # admitted in the very moment in which it gave up
            if isinstance(reason, TimeoutError):
                self._on_rejected("wait_too_long")
                raise self._overloaded(f"it has waited for {self._max_wait_s:g} s, the longest there is") from None
            raise

    def _take(self, num_permits: int) -> None:
        self._num_running += num_permits
        self._idle.clear()

    def _release(self, num_permits: int) -> None:
        self._num_running -= num_permits
        self._admit_first()

    def _admit_first(self) -> None:
        """Admit from the front for as long as the first one fits."""
        while self._queue:
            first = self._queue[0]
            if not first.is_admitted.done():
                if self._num_running + first.num_permits > self._max_running:
                    break
                self._take(first.num_permits)
                self._num_waiting -= 1
                first.is_admitted.set_result(None)
            heapq.heappop(self._queue)
        if not (self._num_running or self._num_waiting):
            self._idle.set()

    def _overloaded(self, why: str) -> OverloadedError:
        rounds = math.ceil((self._num_waiting + 1) / self._max_running)
        retry_after_s = min(max(rounds * self._mean_hold_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        return OverloadedError(
            f"the gateway is full: {why}", hop="gateway", retry_after_s=float(math.ceil(retry_after_s))
        )
