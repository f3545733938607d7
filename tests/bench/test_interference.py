from __future__ import annotations

import pytest

from tests.bench.records import record
from weir.bench.interference import BURST, STEADY, measure_interference
from weir.bench.metrics import Distribution, GoodputLimits
from weir.bench.record import RequestRecord

LIMITS = GoodputLimits()


def steady(*gaps: float, sent_s: float = 0.0) -> RequestRecord:
    """First text one second after it was sent."""
    return record(kind=STEADY, sent_s=sent_s, itl_s=gaps, e2el_s=1.0 + sum(gaps), output_tokens=1 + len(gaps))


def burst(sent_s: float, ttft_s: float | None, failed: str | None = None) -> RequestRecord:
    return record(kind=BURST, sent_s=sent_s, ttft_s=ttft_s, itl_s=(), e2el_s=(ttft_s or 0.0) + 1.0, failed=failed)


@pytest.mark.parametrize(
    ("start_s", "end_s", "gaps"),
    [
        (0.0, 1.0, []),  # before the first text: no gap yet; touching is not overlapping
        (0.0, 1.1, [0.5]),
        (1.2, 1.3, [0.5]),  # inside of one gap
        (1.5, 2.0, [0.25, 0.25]),  # exactly two
        (1.4, 1.9, [0.5, 0.25, 0.25]),
        (2.0, 9.0, [4.0]),
        (6.0, 9.0, []),
    ],
)
def test_a_gap_counts_when_it_overlaps(start_s: float, end_s: float, gaps: list[float]) -> None:
    """Gaps from 1 to 1.5, to 1.75, to 2 and to 6."""
    assert steady(0.5, 0.25, 0.25, 4.0).gaps_between(start_s, end_s) == gaps


def test_the_burst_counts_from_its_sending_to_its_last_first_token() -> None:
    disturbed = [steady(1, 1, 1, 1, 1, 1), burst(3.5, 0.25), burst(3.75, 1.0)]  # 3.5 to 4.75
    found = measure_interference([steady(0.1, 0.1)], disturbed, LIMITS)
    assert (found.burst_sent_s, found.burst_over_s) == (3.5, 4.75)
    assert found.burst_itl_s == Distribution.of([1.0, 1.0])  # 3 to 4 and 4 to 5
    assert found.alone_itl_s == Distribution.of([0.1, 0.1])
    assert found.itl_p99_ratio == pytest.approx(10)
    assert found.burst.ttft_s == Distribution.of([0.25, 1.0])
    assert found.steady.num_requests == 1
    assert found.num_ended_early == 0


def test_a_burst_without_a_first_token_counts_to_its_end() -> None:
    disturbed = [steady(*[1.0] * 9), burst(3.5, None, failed="timeout")]
    found = measure_interference([steady(1)], disturbed, LIMITS)
    assert found.burst_over_s == 4.5
    assert found.burst_itl_s == Distribution.of([1.0, 1.0])


def test_streams_that_ended_before_the_burst_did_are_counted() -> None:
    disturbed = [steady(1), steady(*[1.0] * 9), burst(1.5, 5.0)]
    assert measure_interference([steady(1)], disturbed, LIMITS).num_ended_early == 1


def test_a_burst_that_was_never_sent_has_no_ratio() -> None:
    found = measure_interference([steady(1)], [], LIMITS)
    assert (found.burst_sent_s, found.burst_itl_s, found.itl_p99_ratio) == (None, None, None)
