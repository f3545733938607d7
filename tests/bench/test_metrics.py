"""Against figures worked out by hand."""

from __future__ import annotations

import random

import numpy
import pytest

from tests.bench.records import record
from weir.bench.failure import UNFINISHED
from weir.bench.metrics import Distribution, GoodputLimits, percentile, summarize
from weir.core.errors import ConfigError

NO_LIMITS = GoodputLimits()


@pytest.mark.parametrize(("percent", "value"), [(0, 10), (25, 17.5), (50, 25), (90, 37), (99, 39.7), (100, 40)])
def test_percentiles_lie_between_the_two_nearest_ranks(percent: float, value: float) -> None:
    assert percentile([10, 20, 30, 40], percent) == pytest.approx(value)


def test_of_one_sample_every_percentile_is_that_sample() -> None:
    found = Distribution.of([3.0])
    assert found == Distribution(mean=3, p50=3, p90=3, p99=3, max=3, count=1)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(0)
    samples = [rng.expovariate(1) for _ in range(997)]
    found = Distribution.of(samples)
    assert found is not None
    assert [found.p50, found.p90, found.p99] == pytest.approx(list(numpy.percentile(samples, [50, 90, 99])))
    assert found.mean == pytest.approx(float(numpy.mean(samples)))


def test_no_sample_has_no_distribution() -> None:
    assert Distribution.of([]) is None


def test_time_per_token_is_the_time_after_the_first_over_the_tokens_after_the_first() -> None:
    assert record().tpot_s == pytest.approx((2.0 - 1.0) / 4)
    assert record(output_tokens=1, itl_s=()).tpot_s is None
    assert record(output_tokens=9).tpot_s == pytest.approx(0.125)  # several tokens in a piece


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end() -> None:
    found = summarize([record(sent_s=1.0), record(sent_s=3.0, e2el_s=4.0)], NO_LIMITS)
    assert found.duration_s == 6
    assert found.requests_per_s == pytest.approx(2 / 6)
    assert found.output_tokens_per_s == pytest.approx(10 / 6)
    assert found.total_tokens_per_s == pytest.approx(30 / 6)


def test_failed_requests_count_and_take_no_part_in_the_figures() -> None:
    failed = record(failed="timeout", ttft_s=90.0, itl_s=(50.0,), e2el_s=100.0)
    found = summarize([record(), failed, record(failed="http_429"), record(failed="timeout")], NO_LIMITS)
    assert (found.num_requests, found.num_succeeded, found.num_failed, found.num_unfinished) == (4, 1, 3, 0)
    assert found.failures == {"timeout": 2, "http_429": 1}
    assert found.ttft_s == Distribution.of([1.0])
    assert found.itl_s == Distribution.of([0.25] * 4)
    assert found.e2el_s == Distribution.of([2.0])
    assert found.duration_s == 100
    assert found.output_tokens == 5
    assert found.goodput_share == 0.25


def test_unfinished_requests_count_with_what_they_had() -> None:
    cut = record(failed=UNFINISHED, ttft_s=3.0, itl_s=(0.5,), output_tokens=2, is_counted_by_server=False)
    waiting = record(failed=UNFINISHED, ttft_s=None, itl_s=(), output_tokens=0)
    found = summarize([record(), cut, waiting], NO_LIMITS)
    assert (found.num_succeeded, found.num_failed, found.num_unfinished) == (1, 0, 2)
    assert found.ttft_s == Distribution.of([1.0, 3.0])
    assert found.itl_s == Distribution.of([0.25] * 4 + [0.5])
    assert found.e2el_s == Distribution.of([2.0])
    assert (found.input_tokens, found.output_tokens) == (20, 7)


def test_nothing_sent_is_no_division_by_zero() -> None:
    found = summarize([], NO_LIMITS)
    assert (found.num_requests, found.requests_per_s, found.goodput_share, found.ttft_s) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("limits", "is_good"),
    [
        (["ttft=1"], True),  # the limit itself is good
        (["ttft=0.99"], False),
        (["tpot=0.25", "ttft=2"], True),
        (["tpot=0.24", "ttft=2"], False),
        (["itl=0.3"], False),
        (["itl=0.4"], True),
        (["e2el=1.9"], False),
        ([], True),
    ],
)
def test_a_good_request_meets_every_limit(limits: list[str], is_good: bool) -> None:
    sample = record(itl_s=(0.2, 0.4, 0.2, 0.2))
    assert GoodputLimits.parse(limits).are_met_by(sample) is is_good


def test_a_failed_request_is_never_good_and_one_token_has_no_tpot_to_miss() -> None:
    limits = GoodputLimits.parse(["tpot=0.0001", "itl=0.0001"])
    assert limits.are_met_by(record(output_tokens=1, itl_s=(), e2el_s=1.0))
    assert not GoodputLimits().are_met_by(record(failed="empty"))


def test_goodput_is_good_requests_over_time_and_their_share_of_all() -> None:
    limits = GoodputLimits.parse(["ttft=1.5"])
    found = summarize([record(), record(ttft_s=1.8), record(), record(failed="timeout")], limits)
    assert found.goodput_requests_per_s == pytest.approx(2 / 2.0)
    assert found.goodput_share == 0.5


@pytest.mark.parametrize(
    "limit", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "ttfb=1", "ttft=1s"]
)
def test_what_is_no_limit_is_refused_by_name(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"^goodput: "):
        GoodputLimits.parse([limit])
    with pytest.raises(ConfigError, match=r"^goodput: "):
        GoodputLimits.parse(["ttft=1", "ttft=2"])
