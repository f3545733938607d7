"""Copies and disk jobs that are done as late as they may be, in the order in which they were started.

A copy is done when a test says so, or just before a step that was ordered after it, or when somebody waits for it: so
whoever reads a destination too early finds old bytes, and whoever writes a source too early spoils the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

import torch

from weir.engine.block_copies import BlockCopies, BlockCopy


class LateDevice:
    """What its steps wait for."""

    def __init__(self) -> None:
        self.awaited: list[LateCopy] = []

    def begin_step(self, *_: object) -> None:
        """What was told to precede steps is done now."""
        for copy in self.awaited:
            copy.wait()
        self.awaited.clear()


class LateCopy(BlockCopy):
    """One call of `LateCopies.start`; done after those before it, and after all that steps would wait for then."""

    def __init__(
        self,
        device: LateDevice,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        predecessors: list[LateCopy],
    ) -> None:
        super().__init__(None)
        self._device = device
        self._pairs = pairs
        self._predecessors = predecessors
        self._is_over = False

    @property
    def is_done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        if self._is_over:
            return
        for copy in self._predecessors:
            copy.wait()
        self._predecessors.clear()
        for source, destination in self._pairs:
            destination.copy_(source)
        self._is_over = True

    def precede_steps(self) -> None:
        self._device.awaited.append(self)


class LateCopies(BlockCopies):
    """A stream whose speed a test decides."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._late_device = device
        self._pending: deque[LateCopy] = deque()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> BlockCopy:
        before = [*self._late_device.awaited, *([self._pending[-1]] if self._pending else [])]
        copy = LateCopy(self._late_device, list(pairs), before)
        self._pending.append(copy)
        return copy

    def do(self, count: int = 1) -> None:
        """The oldest ones."""
        while self._pending and count:
            copy = self._pending.popleft()
            count -= not copy.is_done
            copy.wait()


class LateExecutor(Executor):
    """One thread's work, done in the caller's when a test says so."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._pending.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def do(self, count: int = 1) -> None:
        """The oldest jobs."""
        for _ in range(min(count, len(self._pending))):
            self._pending.popleft()()
