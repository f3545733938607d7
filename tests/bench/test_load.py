"""Paces, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.virtual_loop import run_virtual, virtual_clock
from weir.bench.exchange import Exchange
from weir.bench.load import burst_among, closed_loop, open_loop
from weir.bench.request_plan import RequestPlan
from weir.core.deadline import Deadline

START_S = 1000.0


def exchanges(count: int, *, due_s: Callable[[int], float] = lambda _: 0.0, kind: str = "main") -> list[Exchange]:
    return [
        Exchange(
            RequestPlan(kind=kind, index=index, due_s=due_s(index), body=b"", input_tokens=1, output_tokens=1),
            awaited_chunks=1,
        )
        for index in range(count)
    ]


@dataclass
class Performer:
    """Requests take `duration_s` of their index; notes when each began, from the start."""

    duration_s: Callable[[int], float] = lambda _: 1.0
    begun_s: dict[tuple[str, int], float] = field(default_factory=dict)
    num_running: int = 0
    counts: list[int] = field(default_factory=list)

    async def __call__(self, exchange: Exchange) -> None:
        plan = exchange.plan
        self.begun_s[plan.kind, plan.index] = virtual_clock() - START_S
        self.num_running += 1
        self.counts.append(self.num_running)
        await asyncio.sleep(self.duration_s(plan.index))
        exchange.reached.set()
        self.num_running -= 1

    @property
    def order(self) -> list[float]:
        return list(self.begun_s.values())


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


def test_a_closed_loop_never_runs_more_and_stays_full() -> None:
    performer = Performer(duration_s=lambda index: 1.0 + index % 3)
    run(closed_loop(exchanges(20), performer, concurrency=4, until=Deadline.never(), clock=virtual_clock))
    assert len(performer.begun_s) == 20
    assert max(performer.counts) == 4
    assert set(performer.counts[3:]) == {4}


def test_one_at_a_time_is_one_after_the_other() -> None:
    performer = Performer(duration_s=lambda _: 2.0)
    run(closed_loop(exchanges(3), performer, concurrency=1, until=Deadline.never(), clock=virtual_clock))
    assert performer.order == [0, 2, 4]


def test_a_closed_loop_begins_nothing_after_its_time() -> None:
    performer = Performer(duration_s=lambda _: 2.0)
    run(closed_loop(exchanges(9), performer, concurrency=2, until=Deadline(START_S + 3), clock=virtual_clock))
    assert performer.order == [0, 0, 2, 2]


def test_an_open_loop_waits_for_nobody() -> None:
    performer = Performer(duration_s=lambda _: 100.0)
    planned = exchanges(4, due_s=lambda index: [0, 0.5, 0.5, 7.25][index])
    run(open_loop(planned, performer, until=Deadline.never(), clock=virtual_clock))
    assert performer.order == [0, 0.5, 0.5, 7.25]


def test_an_open_loop_begins_nothing_after_its_time() -> None:
    performer = Performer()
    planned = exchanges(9, due_s=float)
    run(open_loop(planned, performer, until=Deadline(START_S + 2.5), clock=virtual_clock))
    assert performer.order == [0, 1, 2]


def test_an_open_loop_ends_at_its_time_and_not_when_the_next_request_would_be_due() -> None:
    performer = Performer()
    planned = exchanges(2, due_s=lambda index: 1000.0 * index)

    async def timed() -> None:
        await open_loop(planned, performer, until=Deadline(START_S + 2.5), clock=virtual_clock)
        assert virtual_clock() == START_S + 2.5

    run(timed())
    assert performer.order == [0]


def test_a_burst_lands_at_once_when_the_last_stream_has_begun_to_speak() -> None:
    performer = Performer(duration_s=lambda index: 1.0 + index)
    steady, burst = exchanges(3, kind="steady"), exchanges(2, kind="burst")
    run(burst_among(steady, burst, performer, until=Deadline.never(), clock=virtual_clock))
    assert performer.begun_s == {
        **{("steady", index): 0.0 for index in range(3)},
        ("burst", 0): 3.0,
        ("burst", 1): 3.0,
    }


def test_a_burst_does_not_land_after_its_time() -> None:
    performer = Performer()
    steady, burst = exchanges(1, kind="steady"), exchanges(1, kind="burst")
    run(burst_among(steady, burst, performer, until=Deadline(START_S + 0.5), clock=virtual_clock))
    assert list(performer.begun_s) == [("steady", 0)]
