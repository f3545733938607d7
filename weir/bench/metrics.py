"""Figures of many requests: percentiles, rates, goodput. Pure arithmetic over records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from weir.bench.record import RequestRecord
from weir.core.errors import ConfigError


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; of at least one value."""
    rank = (len(sorted_values) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (rank - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of samples in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """None where there are no samples."""
        if not samples:
            return None
        values = sorted(samples)
        return cls(
            mean=math.fsum(values) / len(values),
            p50=percentile(values, 50),
            p90=percentile(values, 90),
            p99=percentile(values, 99),
            max=values[-1],
            count=len(values),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputLimits:
    """What a request must meet to count as good, in seconds; None is no limit. `itl` holds for every gap."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> GoodputLimits:
        """From such as `ttft=2`. Raises ConfigError."""
        known = {field.name for field in fields(cls)}
        values: dict[str, float] = {}
        for limit in limits:
            name, _, number = limit.partition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if name not in known or name in values or not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"goodput: {limit!r} is not one of ttft=S, tpot=S, itl=S, e2el=S, each once, S seconds above 0",
                    param="goodput",
                )
            values[name] = value
        return cls(**values)

    def are_met_by(self, record: RequestRecord) -> bool:
        """Whether the request succeeded in time; one token has no TPOT to miss."""
        if record.failure is not None:
            return False
        figures = (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.itl, max(record.itl_s, default=None)),
            (self.e2el, record.e2el_s),
        )
        return all(limit is None or figure is None or figure <= limit for limit, figure in figures)

    def as_dict(self) -> dict[str, float]:
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of the requests of one run or of several. Those that failed count in no time, token or rate.

    Attributes:
        num_unfinished: running when the measurement was interrupted; what they had by then counts in `ttft_s`, `itl_s`
            and tokens.
        duration_s: from the first request sent to the last one's end.
        goodput_share: of all requests, whether they succeeded or not.
    """

    num_requests: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int
    failures: Mapping[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_requests_per_s: float
    goodput_share: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2el_s: Distribution | None


def summarize(records: Sequence[RequestRecord], limits: GoodputLimits, *, duration_s: float | None = None) -> Summary:
    """Figures of `records`, of one run unless their `duration_s` is given."""
    if duration_s is None:
        duration_s = duration_of(records)
    succeeded = [record for record in records if record.failure is None]
    failed = [record.failure for record in records if record.failure is not None and record.is_finished]
    begun = [record for record in records if record.failure is None or not record.is_finished]
    num_good = sum(limits.are_met_by(record) for record in records)
    input_tokens = sum(record.input_tokens for record in begun if record.ttft_s is not None)
    output_tokens = sum(record.output_tokens for record in begun)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Summary(
        num_requests=len(records),
        num_succeeded=len(succeeded),
        num_failed=len(failed),
        num_unfinished=len(records) - len(succeeded) - len(failed),
        failures=dict(Counter(failure.kind for failure in failed).most_common()),
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_s=rate(len(succeeded)),
        output_tokens_per_s=rate(output_tokens),
        total_tokens_per_s=rate(input_tokens + output_tokens),
        goodput_requests_per_s=rate(num_good),
        goodput_share=num_good / len(records) if records else 0.0,
        ttft_s=Distribution.of([record.ttft_s for record in begun if record.ttft_s is not None]),
        tpot_s=Distribution.of([record.tpot_s for record in succeeded if record.tpot_s is not None]),
        itl_s=Distribution.of([gap for record in begun for gap in record.itl_s]),
        e2el_s=Distribution.of([record.e2el_s for record in succeeded]),
    )


def duration_of(records: Sequence[RequestRecord]) -> float:
    """From the first request sent to the last one's end, of one run."""
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)
