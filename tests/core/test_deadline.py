from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from weir.core.deadline import Deadline


class FakeClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_time_runs_out_and_is_never_negative() -> None:
    clock = FakeClock(100.0)
    deadline = Deadline.after(2.0, clock)
    assert deadline.remaining_s(clock) == 2.0
    clock.now_s = 101.5
    assert (deadline.remaining_s(clock), deadline.is_past(clock)) == (0.5, False)
    clock.now_s = 102.0
    assert (deadline.remaining_s(clock), deadline.is_past(clock)) == (0.0, True)
    clock.now_s = 500.0
    assert deadline.remaining_s(clock) == 0.0


def test_never_never_passes_and_is_zero_on_the_wire() -> None:
    clock = FakeClock(1e12)
    assert not Deadline.never().is_past(clock)
    assert math.isinf(Deadline.never().remaining_s(clock))
    assert Deadline.never().remaining_ms(clock) == 0
    assert Deadline.from_remaining_ms(0, clock) == Deadline.never()


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_wire_form_keeps_what_remains_though_clocks_differ(timeout_s: float, here: float, there: float) -> None:
    ours, theirs = FakeClock(here), FakeClock(there)
    received = Deadline.from_remaining_ms(Deadline.after(timeout_s, ours).remaining_ms(ours), theirs)
    assert abs(received.remaining_s(theirs) - timeout_s) <= 0.0011


def test_a_deadline_that_has_passed_is_still_a_deadline_on_the_wire() -> None:
    clock = FakeClock()
    past = Deadline.after(-5, clock)
    assert past.remaining_ms(clock) == 1


def test_earlier_takes_the_one_that_comes_first() -> None:
    soon, late = Deadline(1.0), Deadline(2.0)
    assert soon.earlier(late) == late.earlier(soon) == soon
    assert Deadline.never().earlier(soon) == soon
