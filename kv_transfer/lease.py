"""Until when a prefill worker keeps blocks for others, on its own monotonic clock. Knows keys and times only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir.core.deadline import Clock, Deadline
from weir.core.request import HandoffKey


@dataclass(slots=True)
class _Lease:
    deadline_s: float
    expires_s: float = math.inf


class LeaseTable:
    """Every hold with the time of its end.

    A hold begins without a lease (its owner is still computing and only the deadline bounds it); `grant` starts the
    lease clock and `renew` restarts it. No lease reaches beyond the deadline. Nothing here frees anything: whoever
    owns the timer asks `expired` and ends those holds, which needs no free block and no new work.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[HandoffKey, _Lease] = {}

    @property
    def lease_s(self) -> float:
        return self._lease_s

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: HandoffKey) -> bool:
        return key in self._leases

    def hold(self, key: HandoffKey, deadline: Deadline) -> None:
        """Begin a hold that has no lease yet."""
        self._leases[key] = _Lease(deadline_s=deadline.at_s)

    def grant(self, key: HandoffKey) -> None:
        """Start the lease clock of a hold; unknown keys are ignored."""
        if lease := self._leases.get(key):
            lease.expires_s = self._clock() + self._lease_s

    def renew(self, key: HandoffKey) -> bool:
        """Restart the lease clock, if it runs. False for a hold that is over or whose time is up."""
        lease = self._leases.get(key)
        if lease is None or self._end_s(lease) <= self._clock():
            return False
        if not math.isinf(lease.expires_s):
            lease.expires_s = self._clock() + self._lease_s
        return True

    def drop(self, key: HandoffKey) -> None:
        """The hold is over; idempotent."""
        self._leases.pop(key, None)

    def expired(self) -> tuple[HandoffKey, ...]:
        """Holds whose time is up, oldest hold first; they stay until dropped."""
        now_s = self._clock()
        return tuple(key for key, lease in self._leases.items() if self._end_s(lease) <= now_s)

    @staticmethod
    def _end_s(lease: _Lease) -> float:
        return min(lease.deadline_s, lease.expires_s)
