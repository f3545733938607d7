"""Whether a worker should be given work (handoff.md, rule 8). Watches figures; touches nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from weir.core.deadline import Clock
from weir.engine.stats import EngineStats
from weir.runtime.metrics_server import Health

MIN_STALL_S = 3.0
STALL_STEPS = 4


class Readiness:
    """Red when the engine has work and ends no step, or the oldest transfer makes no progress, for
    max(3 s, 4 x the longest recent step); also while the worker drains. A dead engine is not even live.

    Args:
        stats: of the engine; costs nothing.
        transfer_age_s: for how long the oldest transfer could have moved and has not.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        transfer_age_s: Callable[[], float],
        is_draining: Callable[[], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        self._stats = stats
        self._transfer_age_s = transfer_age_s
        self._is_draining = is_draining
        self._clock = clock

    def health(self) -> Health:
        """The verdict of this moment, with one line why."""
        stats = self._stats()
        if stats.failure is not None:
            return Health(is_live=False, is_ready=False, detail=f"the engine has failed: {stats.failure}")
        if self._is_draining():
            return Health(is_live=True, is_ready=False, detail="draining")
        limit_s = max(MIN_STALL_S, STALL_STEPS * stats.longest_recent_step_s)
        step_age_s = self._clock() - stats.last_step_ended_s
        if stats.has_work and step_age_s > limit_s:
            detail = f"the engine has ended no step for {step_age_s:.1f} s, above {limit_s:.1f} s"
            return Health(is_live=True, is_ready=False, detail=detail)
        transfer_age_s = self._transfer_age_s()
        if transfer_age_s > limit_s:
            detail = f"a transfer has made no progress for {transfer_age_s:.1f} s, above {limit_s:.1f} s"
            return Health(is_live=True, is_ready=False, detail=detail)
        return Health(is_live=True, is_ready=True)
