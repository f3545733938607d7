from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from weir.engine.stats import EngineStats
from weir.runtime.metrics_server import Health
from weir.worker.readiness import Readiness


@dataclass
class Worker:
    stats: EngineStats = field(default_factory=EngineStats)
    transfer_age_s: float = 0.0
    is_draining: bool = False
    now_s: float = 100.0

    def health(self) -> Health:
        return Readiness(
            lambda: self.stats,
            transfer_age_s=lambda: self.transfer_age_s,
            is_draining=lambda: self.is_draining,
            clock=lambda: self.now_s,
        ).health()


def test_an_idle_worker_is_ready_however_long_ago_its_last_step_was() -> None:
    assert Worker(stats=EngineStats(last_step_ended_s=0.0)).health() == Health(is_live=True, is_ready=True)


@pytest.mark.parametrize(
    ("longest_step_s", "age_s", "is_ready"),
    [(0.1, 2.9, True), (0.1, 3.1, False), (2.0, 7.9, True), (2.0, 8.1, False)],
)
def test_work_without_a_step_for_three_seconds_or_four_long_steps_is_red(
    longest_step_s: float, age_s: float, is_ready: bool
) -> None:
    stats = EngineStats(has_work=True, last_step_ended_s=100.0 - age_s, longest_recent_step_s=longest_step_s)
    health = Worker(stats=stats).health()
    assert (health.is_live, health.is_ready) == (True, is_ready)
    assert is_ready or "ended no step" in health.detail


@pytest.mark.parametrize(("age_s", "is_ready"), [(2.9, True), (3.1, False)])
def test_a_transfer_without_progress_is_red(age_s: float, is_ready: bool) -> None:
    health = Worker(transfer_age_s=age_s).health()
    assert (health.is_live, health.is_ready) == (True, is_ready)


def test_a_draining_worker_is_alive_and_takes_no_work() -> None:
    assert Worker(is_draining=True).health() == Health(is_live=True, is_ready=False, detail="draining")


def test_a_dead_engine_is_not_even_alive() -> None:
    health = Worker(stats=EngineStats(failure="out of memory"), is_draining=True).health()
    assert not health.is_live
    assert "out of memory" in health.detail
