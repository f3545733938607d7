"""What a loop waits for: a signal, or at most so long."""

from __future__ import annotations

import asyncio


class Wakeup:
    """A signal for one waiting loop; several signals before it looks are one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Take the signal: True if there was one, False if `timeout_s` passed without."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
