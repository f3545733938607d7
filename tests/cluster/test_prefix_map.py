import time
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.samples import block_hashes
from weir.cluster.prefix_map import PrefixMap
from weir.core.worker import WorkerId

CHAIN = block_hashes(0, 8)
WORKERS = [WorkerId(f"w{index}") for index in range(4)]

operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "drop", "purge"]),
        st.sampled_from(WORKERS),
        st.lists(st.sampled_from(CHAIN), max_size=6),
        st.integers(0, 4),
    ),
    max_size=40,
)


def leading(held: set[object]) -> int:
    depth = 0
    while depth < len(CHAIN) and CHAIN[depth] in held:
        depth += 1
    return depth


@given(operations)
def test_any_history_matches_as_plain_sets_do(history: list[tuple[str, WorkerId, list[object], int]]) -> None:
    prefix_map = PrefixMap(max_entries=1_000)
    model: dict[WorkerId, set[object]] = {worker_id: set() for worker_id in WORKERS}
    for operation, worker_id, hashes, count in history:
        if operation == "add":
            prefix_map.add(worker_id, hashes)  # type: ignore[arg-type]
            model[worker_id].update(hashes)
        elif operation == "remove":
            prefix_map.remove(worker_id, hashes)  # type: ignore[arg-type]
            model[worker_id].difference_update(hashes)
        elif operation == "drop":
            prefix_map.drop(worker_id)
            model[worker_id].clear()
        else:
            prefix_map.purge(count)
        prefix_map.check_integrity()
        for length in (0, 1, len(CHAIN)):
            expected = {who: min(leading(held), length) for who, held in model.items() if min(leading(held), length)}
            assert prefix_map.match(CHAIN[:length]) == expected
        assert {who: prefix_map.num_blocks(who) for who in WORKERS} == {who: len(held) for who, held in model.items()}


def test_dropped_worker_is_gone_at_once_and_its_memory_in_pieces() -> None:
    prefix_map = PrefixMap(max_entries=1_000)
    prefix_map.add(WORKERS[0], CHAIN)
    prefix_map.drop(WORKERS[0])
    assert prefix_map.match(CHAIN) == {}
    assert prefix_map.num_entries == 8
    assert prefix_map.purge(5)
    assert prefix_map.num_entries == 3
    assert not prefix_map.purge(5)
    assert prefix_map.num_entries == 0
    prefix_map.check_integrity()


def test_map_is_bounded_and_counts_what_it_leaves_out() -> None:
    prefix_map = PrefixMap(max_entries=5)
    prefix_map.add(WORKERS[0], CHAIN)
    prefix_map.add(WORKERS[1], CHAIN)
    assert (prefix_map.num_entries, prefix_map.num_untracked) == (5, 11)
    assert prefix_map.match(CHAIN) == {WORKERS[0]: 5}
    prefix_map.remove(WORKERS[0], CHAIN[:2])
    prefix_map.add(WORKERS[1], CHAIN[:1])
    assert prefix_map.match(CHAIN) == {WORKERS[1]: 1}
    prefix_map.check_integrity()


def match_cost_s(num_workers: int, num_matching: int) -> float:
    """Median time of a match of 100 blocks, of which `num_matching` of the workers have some."""
    prefix_map = PrefixMap(max_entries=10_000_000)
    prompt = block_hashes(0, 100)
    for index in range(num_workers):
        worker_id = WorkerId(f"w{index}")
        prefix_map.add(worker_id, block_hashes(1_000 * (index + 1), 50))
        if index < num_matching:
            prefix_map.add(worker_id, prompt[: 100 - index % 100])
    assert len(prefix_map.match(prompt)) == num_matching
    times = []
    for _ in range(200):
        started_s = time.perf_counter()
        prefix_map.match(prompt)
        times.append(time.perf_counter() - started_s)
    return median(times)


def test_cost_of_a_match_is_flat_from_1_to_1000_workers() -> None:
    """With one worker that matches, a thousand more that do not change nothing but the width of the integers."""
    assert match_cost_s(1_000, 1) < 4 * match_cost_s(1, 1)


@pytest.mark.full
def test_cost_of_a_match_grows_no_faster_than_the_workers_that_match() -> None:
    assert match_cost_s(1_000, 1_000) < 2 * 10 * match_cost_s(1_000, 100)
