"""Fetches that came too early: few, for a short time, and gone with their connection."""

from __future__ import annotations

from typing import cast

from kv_transfer.connection import Connection
from kv_transfer.parked_fetches import ParkedFetches
from protos.kv_transfer_pb2 import Fetch
from tests.kv_transfer.identities import make_key

A, B = make_key("a"), make_key("b")
HERE, THERE = cast(Connection, object()), cast(Connection, object())


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_no_more_than_the_limit_are_parked() -> None:
    parked = ParkedFetches(2, 5.0, Clock())
    assert parked.park(A, HERE, Fetch())
    assert parked.park(B, HERE, Fetch())
    assert not parked.park(A, THERE, Fetch())
    assert parked.park(A, HERE, Fetch(skip_tokens=1)), "a repeated one takes its own place"
    assert len(parked) == 2


def test_each_waits_for_the_time_out_or_its_own_deadline() -> None:
    clock = Clock()
    parked = ParkedFetches(9, 5.0, clock)
    parked.park(A, HERE, Fetch(remaining_ms=1000))
    parked.park(B, HERE, Fetch(remaining_ms=60_000))
    clock.now_s = 1.0
    assert [each.key for each in parked.take_expired()] == [A]
    clock.now_s = 5.0
    assert [each.key for each in parked.take_expired()] == [B]
    assert len(parked) == 0


def test_putting_back_does_not_prolong() -> None:
    clock = Clock()
    parked = ParkedFetches(9, 5.0, clock)
    parked.park(A, HERE, Fetch())
    clock.now_s = 4.0
    for each in parked.take(A):
        parked.put_back(each)
    clock.now_s = 5.0
    assert len(parked.take_expired()) == 1


def test_taking_gives_those_of_one_hand_off_oldest_first() -> None:
    parked = ParkedFetches(9, 5.0, Clock())
    parked.park(A, THERE, Fetch())
    parked.park(B, HERE, Fetch())
    parked.park(A, HERE, Fetch())
    assert [each.connection for each in parked.take(A)] == [THERE, HERE]
    assert parked.take(A) == ()
    assert parked.has(B, HERE)


def test_they_go_with_their_connection_or_when_dropped() -> None:
    parked = ParkedFetches(9, 5.0, Clock())
    parked.park(A, HERE, Fetch())
    parked.park(B, HERE, Fetch())
    parked.park(B, THERE, Fetch())
    parked.drop(A, HERE)
    parked.drop(A, HERE)
    parked.drop_connection(HERE)
    assert [each.connection for each in parked.take(B)] == [THERE]
