"""The laws of admission: bounded, in order, and no permit is ever lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import AdmissionController
from weir.core.errors import OverloadedError, UnavailableError


def controller(*, max_running: int = 2, max_waiting: int = 8, max_wait_s: float = 30.0) -> AdmissionController:
    return AdmissionController(max_running=max_running, max_waiting=max_waiting, max_wait_s=max_wait_s)


class Guests:
    """Requests that stay until they are told to leave."""

    def __init__(self, admission: AdmissionController, tasks: asyncio.TaskGroup) -> None:
        self.admission = admission
        self.tasks = tasks
        self.inside: list[str] = []
        self.entered: list[str] = []
        self.refused: list[str] = []
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.sizes: dict[str, int] = {}

    async def arrive(self, name: str, *, num_prompts: int = 1, priority: int = 0) -> None:
        self._leaving[name] = asyncio.Event()
        self.sizes[name] = num_prompts
        self._tasks[name] = self.tasks.create_task(self._stay(name, num_prompts, priority))
        await settle()

    async def leave(self, name: str) -> None:
        self._leaving[name].set()
        await settle()

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _stay(self, name: str, num_prompts: int, priority: int) -> None:
        try:
            async with self.admission.admit("", num_prompts=num_prompts, priority=priority):
                self.entered.append(name)
                self.inside.append(name)
                try:
                    await self._leaving[name].wait()
                finally:
                    self.inside.remove(name)
        except (OverloadedError, UnavailableError):
            self.refused.append(name)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_no_more_than_the_bound_run_and_the_rest_waits_in_order() -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=2), tasks)
        for name in "abcd":
            await guests.arrive(name)
        assert guests.inside == ["a", "b"]
        assert guests.admission.num_waiting == 2
        await guests.leave("b")
        await guests.leave("a")
        assert guests.entered == ["a", "b", "c", "d"]
        await guests.leave("c")
        await guests.leave("d")
    assert guests.admission.num_running == 0


async def test_priority_goes_first_and_arrival_decides_within_it() -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=1), tasks)
        await guests.arrive("first")
        await guests.arrive("late", priority=1)
        await guests.arrive("normal")
        await guests.arrive("normal too")
        await guests.arrive("urgent", priority=-1)
        for name in ("first", "urgent", "normal", "normal too", "late"):
            await guests.leave(name)
    assert guests.entered == ["first", "urgent", "normal", "normal too", "late"]


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=2), tasks)
        await guests.arrive("a")
        await guests.arrive("large", num_prompts=2)
        await guests.arrive("small")
        assert guests.inside == ["a"]
        await guests.leave("a")
        assert guests.inside == ["large"]
        await guests.leave("large")
        await guests.leave("small")
    assert guests.entered == ["a", "large", "small"]


async def test_a_request_larger_than_the_bound_runs_alone() -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=2), tasks)
        await guests.arrive("huge", num_prompts=9)
        await guests.arrive("a")
        assert guests.inside == ["huge"]
        await guests.leave("huge")
        await guests.leave("a")
    assert guests.admission.num_running == 0


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    reasons: list[str] = []
    admission = AdmissionController(max_running=1, max_waiting=0, max_wait_s=30.0, on_rejected=reasons.append)
    async with admission.admit():
        with pytest.raises(OverloadedError) as caught:
            async with admission.admit():
                pytest.fail("admitted")
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1.0
    assert reasons == ["queue_full"]
    async with admission.admit():
        assert admission.num_running == 1


async def test_a_wait_that_is_too_long_is_refused_and_costs_no_permit() -> None:
    reasons: list[str] = []
    admission = AdmissionController(max_running=1, max_waiting=1, max_wait_s=0.001, on_rejected=reasons.append)
    async with admission.admit():
        with pytest.raises(OverloadedError):
            async with admission.admit():
                pytest.fail("admitted")
    assert reasons == ["wait_too_long"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_draining_refuses_new_ones_and_lets_those_inside_finish() -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=1), tasks)
        await guests.arrive("running")
        await guests.arrive("waiting")
        guests.admission.refuse_new()
        await guests.arrive("late")
        assert guests.refused == ["late"]
        idle = tasks.create_task(guests.admission.wait_until_idle())
        await guests.leave("running")
        assert guests.inside == ["waiting"]
        assert not idle.done()
        await guests.leave("waiting")
        await idle


async def test_one_that_is_cancelled_in_the_moment_of_its_admission_gives_its_permit_on() -> None:
    admission = controller(max_running=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.admit())

        async def enter() -> None:
            async with admission.admit():
                pytest.fail("it was cancelled")

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(enter())
            await settle()
            await stack.aclose()  # admits the waiting one, which has not run yet
            assert admission.num_running == 1
            waiting.cancel()
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    await admission.wait_until_idle()


MOVES = st.lists(
    st.tuples(st.sampled_from(["arrive", "leave", "give up"]), st.integers(0, 7), st.integers(1, 3), st.integers(0, 2)),
    max_size=40,
)


@given(moves=MOVES)
def test_whatever_happens_the_bound_holds_and_nothing_is_lost(moves: list[tuple[str, int, int, int]]) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[str, int, int, int]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        guests = Guests(controller(max_running=3, max_waiting=4), tasks)
        admission = guests.admission
        present: list[str] = []
        for number, (move, which, num_prompts, priority) in enumerate(moves):
            if move == "arrive":
                name = str(number)
                present.append(name)
                await guests.arrive(name, num_prompts=num_prompts, priority=priority)
            elif present:
                name = present.pop(which % len(present))
                await (guests.leave(name) if move == "leave" else guests.give_up(name))
            assert admission.num_running == sum(guests.sizes[name] for name in guests.inside) <= 3
            assert admission.num_waiting <= 4
        for name in present:
            await guests.leave(name)
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    async with asyncio.timeout(1):
        await admission.wait_until_idle()
