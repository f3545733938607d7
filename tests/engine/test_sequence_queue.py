"""SequenceQueue: order, leaving out of turn, and no room for those who left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.model_runner import make_request
from weir.engine.sequence import Sequence
from weir.engine.sequence_queue import SequenceQueue


def make_sequence(arrival: int, priority: int = 0) -> Sequence:
    request = make_request(f"s{arrival}", [1], priority=priority)
    return Sequence(request, arrival=arrival, arrived_s=0.0)


def make_queue() -> SequenceQueue:
    return SequenceQueue(lambda sequence: sequence.sort_key)


@given(priorities=st.lists(st.integers(-2, 2), max_size=12), leaving=st.sets(st.integers(0, 11)))
def test_first_come_first_served_within_a_priority(priorities: list[int], leaving: set[int]) -> None:
    queue = make_queue()
    sequences = [make_sequence(arrival, priority) for arrival, priority in enumerate(priorities)]
    for sequence in sequences:
        queue.push(sequence)
    for arrival in leaving & set(range(len(sequences))):
        queue.discard(sequences[arrival])
        queue.discard(sequences[arrival])
    expected = [s for s in sorted(sequences, key=lambda s: s.sort_key) if s.arrival not in leaving]
    assert len(queue) == len(expected)
    for sequence in expected:
        assert queue.find_first() is sequence
        queue.discard(sequence)
    assert queue.find_first() is None


def test_who_comes_back_keeps_its_place() -> None:
    queue = make_queue()
    first, second = make_sequence(0), make_sequence(1)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    queue.push(first)
    assert queue.find_first() is first


def test_those_who_left_take_no_room() -> None:
    queue = make_queue()
    queue.push(make_sequence(0))
    for arrival in range(1, 2000):
        sequence = make_sequence(arrival)
        queue.push(sequence)
        queue.discard(sequence)
    assert len(queue._heap) < 50
