"""An event loop whose time is a number: waiting costs nothing, order is deterministic, a deadlock is an error."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualSelector(selectors.DefaultSelector):
    """Never waits: it moves the loop's time on instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer runs")
        self.loop.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For tests without real I/O; `time` is also the clock to pass to what is tested."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _VirtualSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time. What the loop would only log is raised."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        unhandled: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        result = runner.run(main)
    if unhandled:
        raise AssertionError(f"unhandled in a callback: {unhandled}") from unhandled[0].get("exception")
    return result


def virtual_clock() -> float:
    """The running loop's time, as a `Clock`."""
    return asyncio.get_running_loop().time()
