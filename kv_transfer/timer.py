"""A callback at a steady pace on the running loop; owned by whoever starts it, and stopped by the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class PeriodicTimer:
    """Calls `callback` every `interval_s` seconds between `start` and `stop`, even if one call raises."""

    def __init__(self, interval_s: float, callback: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._interval_s, self._fire)

    def stop(self) -> None:
        """No call begins after this; idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self.start()
        self._callback()
