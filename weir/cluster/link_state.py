"""Whether this process's own link to Redis works, and since when. Talks to nobody: the connection reports to it."""

from __future__ import annotations

import asyncio
import time

from weir.core.deadline import Clock


class LinkState:
    """Down until the first `mark_up`. All calls belong to one event loop."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._up_since_s: float | None = None
        self._changed = asyncio.Event()
        self.num_interruptions = 0
        """Grows whenever the link goes down, is replaced or Redis turns out to have lost its data."""

    @property
    def is_up(self) -> bool:
        return self._up_since_s is not None

    @property
    def up_since_s(self) -> float | None:
        """The point on the clock since which no exchange with Redis has failed; None while it is down."""
        return self._up_since_s

    def has_been_up_for(self, duration_s: float) -> bool:
        """True if for the last `duration_s` what Redis said was what Redis knew."""
        return self._up_since_s is not None and self._clock() - self._up_since_s >= duration_s

    def mark_up(self) -> None:
        if self._up_since_s is None:
            self._up_since_s = self._clock()
            self._notify()

    def mark_down(self) -> None:
        if self._up_since_s is not None:
            self._up_since_s = None
            self.num_interruptions += 1
            self._notify()

    def mark_interrupted(self) -> None:
        """The link works, but not without a gap: a connection broke and was replaced, or Redis lost its data."""
        if self._up_since_s is not None:
            self._up_since_s = self._clock()
            self.num_interruptions += 1
            self._notify()

    async def wait_for_change(self) -> None:
        """Until the next change or interruption."""
        await self._changed.wait()

    async def wait_until_up(self) -> None:
        while not self.is_up:
            await self._changed.wait()

    async def wait_for_interruption(self, num_interruptions: int) -> None:
        """Until `num_interruptions` is no longer what the caller has seen."""
        while self.num_interruptions == num_interruptions:
            await self._changed.wait()

    async def wait_for_return(self) -> None:
        """Until the next interruption from now on is over."""
        await self.wait_for_interruption(self.num_interruptions)
        await self.wait_until_up()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
