"""What a computation does at least, and how fast a card was seen to do it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What a card was seen to do.

    Attributes:
        bytes_per_s: read and written together, by a large copy.
        flops_per_s: of a large bfloat16 product; a multiply-add is two.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that must go to or come from memory, floating-point operations."""

    num_bytes: int
    flops: int = 0

    def seconds(self, peaks: Peaks) -> float:
        """Of a card that does both at once, each as fast as it can."""
        return max(self.num_bytes / peaks.bytes_per_s, self.flops / peaks.flops_per_s)
