from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from weir.bench.lengths import Lengths
from weir.bench.workload import PRESETS, poisson_arrivals


@pytest.mark.parametrize(
    ("name", "streams", "num_requests", "shared", "tokens_in", "tokens_out"),
    [
        ("w1", 1, 8, 0, 128, 64),
        ("w2", 16, 48, 0, 256, 64),
        ("w3", 32, 64, 0, 64, 128),
        ("w4", 8, 32, 512, 32, 32),
        ("w5", 4, 4, 0, 64, 256),
    ],
)
def test_a_name_is_one_shape(
    name: str, streams: int, num_requests: int, shared: int, tokens_in: int, tokens_out: int
) -> None:
    workload = PRESETS[name]
    assert workload.name == name
    assert (workload.concurrency, workload.num_requests) == (streams, num_requests)
    assert workload.shared_prefix_tokens == shared
    assert set(workload.draw_lengths(0)) == {(tokens_in, tokens_out)}


def test_w5_has_four_prompts_of_1500_tokens_that_land_after_32_pieces() -> None:
    burst = PRESETS["w5"].burst
    assert burst is not None
    assert (burst.num_requests, burst.input_tokens, burst.after_chunks) == (4, 1500, 32)


def test_w6_has_rising_rates_and_a_long_tail() -> None:
    workload = PRESETS["w6"]
    assert workload.concurrency is None
    assert list(workload.request_rates) == sorted(set(workload.request_rates))
    assert isinstance(workload.input_tokens, Lengths)
    assert workload.input_tokens.sigma > 0


def test_the_same_seed_gives_the_same_lengths() -> None:
    workload = PRESETS["w6"]
    assert workload.draw_lengths(1) == workload.draw_lengths(1)
    assert workload.draw_lengths(1) != workload.draw_lengths(2)


def test_gaps_between_arrivals_are_exponential() -> None:
    gaps = [after - before for before, after in pairwise(poisson_arrivals(4.0, 5000, seed=0))]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.02)


def test_a_higher_rate_is_the_same_pattern_faster() -> None:
    slow, fast = (poisson_arrivals(rate, 20, seed=3) for rate in (1.0, 8.0))
    assert slow[0] == 0
    assert fast == pytest.approx([arrival / 8 for arrival in slow])
    assert poisson_arrivals(1.0, 20, seed=4) != slow


def test_an_infinite_rate_is_all_at_once() -> None:
    assert set(poisson_arrivals(math.inf, 10, seed=0)) == {0.0}
