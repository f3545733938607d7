"""Copies and disk jobs that are done as late as they may be, in the order in which they were started.

A copy is done when a test says so, or just before a step that was ordered after it, or when somebody waits for it: so
whoever reads a destination too early finds old bytes, and whoever writes a source too early spoils the copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

import torch

from weir.engine.block_copies import BlockCopies, BlockCopy


class LateCopy(BlockCopy):
    """One call of `LateCopies.start`."""

    def __init__(self, copies: LateCopies, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(None)
        self._copies = copies
        self._pairs = pairs
        self._is_over = False

    @property
    def is_done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        self._copies.do_until(self)

    def precede_steps(self) -> None:
        self._copies.precedes_steps = self

    def do(self) -> None:
        for source, destination in self._pairs:
            destination.copy_(source)
        self._is_over = True


class LateCopies(BlockCopies):
    """A copy stream whose speed a test decides."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.precedes_steps: LateCopy | None = None
        self.num_started = 0
        self._pending: deque[LateCopy] = deque()
        self._lock = threading.Lock()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> BlockCopy:
        copy = LateCopy(self, list(pairs))
        self.num_started += 1
        self._pending.append(copy)
        return copy

    def do(self, count: int = 1) -> None:
        """The oldest ones."""
        with self._lock:
            for _ in range(min(count, len(self._pending))):
                self._pending.popleft().do()

    def do_until(self, last: LateCopy) -> None:
        with self._lock:
            while not last.is_done:
                self._pending.popleft().do()

    def begin_step(self, *_: object) -> None:
        """What was told to precede steps is done now, with all that was started before it."""
        if self.precedes_steps is not None:
            self.do_until(self.precedes_steps)
            self.precedes_steps = None


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
