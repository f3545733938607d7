"""What a burst of long prompts does to the streams that run: W5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weir.bench.metrics import Distribution, GoodputLimits, Summary, summarize
from weir.bench.record import RequestRecord

STEADY = "steady"
BURST = "burst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The steady streams by themselves, and while the burst waited for its first tokens.

    Attributes:
        alone_itl_s: every gap of the steady streams that had no burst beside them.
        burst_itl_s: the gaps of the steady streams that overlap the time from the burst's sending to its last first
            token; of a burst without one, to its end.
        burst_sent_s, burst_over_s: that time, from the start of its run; None where the burst was never sent.
        num_ended_early: steady streams that ended before that time did.
    """

    alone: Summary
    alone_itl_s: Distribution | None
    steady: Summary
    burst_itl_s: Distribution | None
    burst: Summary
    burst_sent_s: float | None
    burst_over_s: float | None
    num_ended_early: int

    @property
    def itl_p99_ratio(self) -> float | None:
        if self.alone_itl_s is None or self.burst_itl_s is None:
            return None
        return self.burst_itl_s.p99 / self.alone_itl_s.p99


def measure_interference(
    alone: Sequence[RequestRecord], disturbed: Sequence[RequestRecord], limits: GoodputLimits
) -> Interference:
    """From the records of the two runs."""
    steady = [record for record in disturbed if record.kind == STEADY]
    burst = [record for record in disturbed if record.kind == BURST]
    sent_s = over_s = None
    gaps: list[float] = []
    num_ended_early = 0
    if burst:
        sent_s = min(record.sent_s for record in burst)
        over_s = max(record.ended_s if record.first_text_s is None else record.first_text_s for record in burst)
        gaps = [gap for record in steady for gap in record.gaps_between(sent_s, over_s)]
        num_ended_early = sum(record.ended_s < over_s for record in steady)
    return Interference(
        alone=summarize(alone, limits),
        alone_itl_s=Distribution.of([gap for record in alone for gap in record.itl_s]),
        steady=summarize(steady, limits),
        burst_itl_s=Distribution.of(gaps),
        burst=summarize(burst, limits),
        burst_sent_s=sent_s,
        burst_over_s=over_s,
        num_ended_early=num_ended_early,
    )
