"""Leases on a clock that the test moves."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.lease import LeaseTable
from tests.kv_transfer.identities import make_key
from weir.core.deadline import Deadline


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


A, B = make_key("a"), make_key("b")


def test_a_hold_without_a_lease_lives_until_its_deadline() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    table.hold(A, Deadline(100.0))
    table.hold(B, Deadline.never())
    clock.now_s = 99.9
    assert table.expired() == ()
    clock.now_s = 100.0
    assert table.expired() == (A,)


def test_the_lease_clock_starts_with_the_grant_and_restarts_with_a_renewal() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    table.hold(A, Deadline.never())
    clock.now_s = 50.0
    table.grant(A)
    clock.now_s = 59.0
    assert table.renew(A)
    clock.now_s = 68.9
    assert table.expired() == ()
    clock.now_s = 69.0
    assert table.expired() == (A,)


def test_a_renewal_starts_no_lease_before_the_grant() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    table.hold(A, Deadline.never())
    assert table.renew(A)
    clock.now_s = 1e6
    assert table.expired() == ()


def test_nothing_reaches_beyond_the_deadline() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    table.hold(A, Deadline(15.0))
    table.grant(A)
    clock.now_s = 9.0
    assert table.renew(A)
    clock.now_s = 15.0
    assert table.expired() == (A,)
    assert not table.renew(A)


def test_an_expired_or_unknown_hold_is_not_renewed() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    table.hold(A, Deadline.never())
    table.grant(A)
    clock.now_s = 10.0
    assert not table.renew(A)
    assert not table.renew(B)
    assert table.expired() == (A,), "a refused renewal changes nothing"


def test_expired_holds_stay_until_they_are_dropped_and_dropping_is_idempotent() -> None:
    clock = FakeClock()
    table = LeaseTable(10.0, clock)
    for key in (A, B):
        table.hold(key, Deadline.never())
        table.grant(key)
    clock.now_s = 11.0
    assert table.expired() == table.expired() == (A, B)
    table.drop(A)
    table.drop(A)
    table.grant(A)
    assert table.expired() == (B,)
    assert A not in table
    assert len(table) == 1


class LeaseMachine(RuleBasedStateMachine):
    """Against the plainest model: a hold ends at min(deadline, last grant or renewal + lease)."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table = LeaseTable(10.0, self.clock)
        self.ends: dict[str, list[float]] = {}  # deadline, lease end

    @rule(name=st.sampled_from("abc"), deadline=st.integers(1, 60))
    def hold(self, name: str, deadline: int) -> None:
        if name not in self.ends:
            at_s = self.clock.now_s + deadline
            self.table.hold(make_key(name), Deadline(at_s))
            self.ends[name] = [at_s, float("inf")]

    @rule(name=st.sampled_from("abc"))
    def grant(self, name: str) -> None:
        self.table.grant(make_key(name))
        if name in self.ends:
            self.ends[name][1] = self.clock.now_s + 10.0

    @rule(name=st.sampled_from("abc"))
    def renew(self, name: str) -> None:
        is_alive = name in self.ends and min(self.ends[name]) > self.clock.now_s
        assert self.table.renew(make_key(name)) == is_alive
        if is_alive and self.ends[name][1] != float("inf"):
            self.ends[name][1] = self.clock.now_s + 10.0

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def sweep(self) -> None:
        for key in self.table.expired():
            self.table.drop(key)
            del self.ends[key.handoff_id]

    @invariant()
    def expired_are_those_whose_time_is_up(self) -> None:
        expected = {name for name, ends in self.ends.items() if min(ends) <= self.clock.now_s}
        assert {key.handoff_id for key in self.table.expired()} == expected
        assert len(self.table) == len(self.ends)


TestLeaseMachine = LeaseMachine.TestCase
