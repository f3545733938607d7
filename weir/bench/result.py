"""What a measurement found, and the JSON of it. The form is described in docs/benchmarking.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weir.bench.interference import Interference
from weir.bench.metrics import Distribution, GoodputLimits, Summary
from weir.bench.record import RequestRecord
from weir.bench.workload import Workload

SCHEMA = 1
"""Counts up when a field changes its meaning or goes; new fields may come at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run: its name, the rate that it was driven at if it was, and its requests in the order of their plan."""

    name: str
    request_rate: float | None
    summary: Summary
    records: Sequence[RequestRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that was found.

    Attributes:
        stopped_by: "interrupt" or "max_duration"; None when every planned request was sent and has ended.
        client_cpu_s: CPU time of this process while it measured.
        notes: what a reader must know before believing the figures.
    """

    workload: Workload
    model: str
    server: str | None
    stopped_by: str | None
    started_at: str
    limits: GoodputLimits
    summary: Summary
    runs: Sequence[RunResult]
    interference: Interference | None
    client_cpu_s: float
    notes: Sequence[str]

    @property
    def client_cpu_us_per_token(self) -> float | None:
        num_tokens = sum(record.output_tokens for run in self.runs for record in run.records)
        return self.client_cpu_s / num_tokens * 1e6 if num_tokens else None

    def to_dict(self, *, config: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
        """JSON-ready; `config` and `versions` are what the caller adds to it."""
        document = {
            "schema": SCHEMA,
            "workload": self.workload.name,
            "complete": self.stopped_by is None,
            "stopped_by": self.stopped_by,
            "started_at": self.started_at,
            "versions": {**versions, "server": self.server},
            "config": {**config, "model": self.model},
            "notes": list(self.notes),
            **_summary(self.summary),
            "goodput_limits_s": self.limits.as_dict(),
            "client_cpu_s": self.client_cpu_s,
            "client_cpu_us_per_token": self.client_cpu_us_per_token,
        }
        if self.interference is not None:
            document |= _interference(self.interference)
        if len(self.runs) > 1 and self.interference is None:
            document["sweep"] = [
                {"request_rate": _finite(run.request_rate), **_summary(run.summary)} for run in self.runs
            ]
        document["requests"] = [_record(record) for run in self.runs for record in run.records]
        return document


def _finite(rate: float | None) -> float | None:
    """JSON has no infinity."""
    return None if rate is None or math.isinf(rate) else rate


def _summary(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "failures": dict(summary.failures)}


def _interference(found: Interference) -> dict[str, Any]:
    return {
        "alone": {**_summary(found.alone), **_tail(found.alone_itl_s)},
        "burst": {
            **_summary(found.steady),
            **_tail(found.burst_itl_s),
            "ttft_p50_s": found.burst.ttft_s.p50 if found.burst.ttft_s else None,
            "ttft_max_s": found.burst.ttft_s.max if found.burst.ttft_s else None,
            "num_burst_requests": found.burst.num_requests,
            "num_failed_burst": found.burst.num_failed,
            "sent_s": found.burst_sent_s,
            "last_first_token_s": found.burst_over_s,
        },
        "itl_p99_ratio": found.itl_p99_ratio,
    }


def _tail(gaps: Distribution | None) -> dict[str, Any]:
    if gaps is None:
        return {"itl_p50_s": None, "itl_p99_s": None, "itl_max_s": None, "num_itl_samples": 0}
    return {"itl_p50_s": gaps.p50, "itl_p99_s": gaps.p99, "itl_max_s": gaps.max, "num_itl_samples": gaps.count}


def _record(record: RequestRecord) -> dict[str, Any]:
    document = asdict(record)
    failure = document.pop("failure")
    is_counted_by_server = document.pop("is_counted_by_server")
    return {
        **document,
        "tpot_s": record.tpot_s,
        "output_tokens_from": "usage" if is_counted_by_server else "chunks",
        "error": failure,
    }
