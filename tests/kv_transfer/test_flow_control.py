"""Credit is never negative, never more than a window, and never lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.flow_control import MAX_CREDIT_BYTES, ReceiveWindow, SendCredit
from weir.core.errors import TransferProtocolError


@given(st.integers(0, 1000), st.lists(st.tuples(st.booleans(), st.integers(0, 500))))
def test_send_credit_is_never_negative(initial: int, steps: list[tuple[bool, int]]) -> None:
    credit = SendCredit(initial)
    expected = initial
    for is_gift, size in steps:
        if is_gift:
            credit.give(size)
            expected += size
        elif credit.covers(size):
            credit.take(size)
            expected -= size
        else:
            assert size > expected
        assert credit.available_bytes == expected >= 0


def test_taking_what_is_not_covered_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        SendCredit(5).take(6)


@pytest.mark.parametrize("size", [-1, MAX_CREDIT_BYTES])
def test_a_gift_beyond_any_window_is_refused(size: int) -> None:
    credit = SendCredit(1)
    with pytest.raises(TransferProtocolError):
        credit.give(size)
    assert credit.available_bytes == 1


@given(st.integers(4, 1000), st.integers(0, 4000), st.lists(st.integers(1, 400), max_size=60))
def test_both_sides_agree_and_the_window_never_shrinks(initial: int, window_bytes: int, sizes: list[int]) -> None:
    window = ReceiveWindow(initial)
    credit = SendCredit(initial)
    total = initial
    for index, size in enumerate(sizes):
        if index == 5:
            window.open(window_bytes)
            total = max(initial, window_bytes)
        if credit.covers(size):
            credit.take(size)
            window.receive(size)
            window.free(size)
        credit.give(window.give_back())
        assert credit.available_bytes == window.granted_bytes
        assert window.granted_bytes + window.owed_bytes == total
        assert window.owed_bytes < max(1, total / 4), "more than a quarter is withheld"


def test_more_than_was_granted_is_refused() -> None:
    window = ReceiveWindow(10)
    window.receive(10)
    with pytest.raises(TransferProtocolError, match="credit of 0 left"):
        window.receive(1)


def test_credit_is_given_back_in_quarters() -> None:
    window = ReceiveWindow(100)
    window.receive(24)
    assert window.give_back() == 0
    window.free(24)
    assert window.give_back() == 0
    window.receive(1)
    window.free(1)
    assert window.give_back() == 25
    assert window.give_back() == 0
