"""Points in time after which nobody waits any more.

A deadline is a point on the local monotonic clock. On the wire it travels as the time that remains, since clocks
differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds on a monotonic clock; tests pass their own."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the local monotonic clock, in seconds."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = time.monotonic) -> Deadline:
        """The point `timeout_s` from now."""
        return cls(clock() + timeout_s)

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    @classmethod
    def from_remaining_ms(cls, remaining_ms: int, clock: Clock = time.monotonic) -> Deadline:
        """Read the wire form; 0 means that the sender set none."""
        return cls.after(remaining_ms / 1000, clock) if remaining_ms else cls.never()

    def remaining_s(self, clock: Clock = time.monotonic) -> float:
        """Seconds left, never negative; infinite for `never`."""
        return max(0.0, self.at_s - clock())

    def remaining_ms(self, clock: Clock = time.monotonic) -> int:
        """Wire form: at least 1 while a deadline is set, 0 for `never`."""
        remaining_s = self.remaining_s(clock)
        return 0 if math.isinf(remaining_s) else max(1, int(remaining_s * 1000))

    def is_past(self, clock: Clock = time.monotonic) -> bool:
        return clock() >= self.at_s

    def earlier(self, other: Deadline) -> Deadline:
        return self if self.at_s <= other.at_s else other
