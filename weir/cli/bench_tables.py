"""The figures of a measurement for a person: times in milliseconds, rates a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weir.bench.interference import Interference
from weir.bench.metrics import Distribution, GoodputLimits, Summary
from weir.bench.result import BenchResult, RunResult
from weir.bench.workload import Workload

MIN_WIDTH = 120
NOTHING = "-"


def print_tables(result: BenchResult, console: Console) -> None:
    """All there is to say, in lines that stay whole in a file."""
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    console.print(Text(f"{_shape_of(result.workload)}; {result.model}"), soft_wrap=True)
    console.print(_times(result.summary))
    if result.interference is not None:
        console.print(_interference(result.interference))
    elif len(result.runs) > 1:
        console.print(_sweep(result.runs))
    for line in _lines(result):
        console.print(Text(line), soft_wrap=True)


def _shape_of(workload: Workload) -> str:
    shared = f"{workload.shared_prefix_tokens} shared + " if workload.shared_prefix_tokens else ""
    pace = f"{workload.concurrency} at a time" if workload.concurrency is not None else "Poisson arrivals"
    burst = workload.burst
    landing = f", {burst.num_requests} prompts of {burst.input_tokens:,} tokens landing" if burst is not None else ""
    return (
        f"{workload.name}: {workload.num_requests} requests, {pace}, "
        f"{shared}{workload.input_tokens} in, {workload.output_tokens} out{landing}"
    )


def _times(summary: Summary) -> Table:
    table = _table("ms", "mean", "p50", "p90", "p99", "max")
    rows = {"TTFT": summary.ttft_s, "TPOT": summary.tpot_s, "ITL": summary.itl_s, "E2EL": summary.e2el_s}
    for name, times in rows.items():
        table.add_row(name, *_figures(times, "mean", "p50", "p90", "p99", "max"))
    return table


def _interference(found: Interference) -> Table:
    table = _table("steady streams, ms", "ITL p50", "ITL p99", "ITL max", "gaps", "burst TTFT p50", "max")
    table.add_row("alone", *_tail(found.alone_itl_s), NOTHING, NOTHING)
    table.add_row("during the burst", *_tail(found.burst_itl_s), *_figures(found.burst.ttft_s, "p50", "max"))
    if found.itl_p99_ratio is not None:
        table.add_row("ratio", "", f"{found.itl_p99_ratio:.2f}", "", "", "", "")
    return table


def _tail(gaps: Distribution | None) -> tuple[str, ...]:
    return (*_figures(gaps, "p50", "p99", "max"), str(gaps.count if gaps is not None else 0))


def _sweep(runs: Sequence[RunResult]) -> Table:
    table = _table(
        *("rate /s", "done /s", "out tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99"),
        *("goodput /s", "share", "failed"),
    )
    for run in runs:
        summary = run.summary
        table.add_row(
            f"{run.request_rate:g}",
            f"{summary.requests_per_s:.2f}",
            f"{summary.output_tokens_per_s:.1f}",
            *_figures(summary.ttft_s, "p50", "p99"),
            *_figures(summary.tpot_s, "p50", "p99"),
            *_figures(summary.itl_s, "p99"),
            f"{summary.goodput_requests_per_s:.2f}",
            f"{summary.goodput_share:.0%}",
            str(summary.num_failed),
        )
    return table


def _lines(result: BenchResult) -> Iterator[str]:
    summary = result.summary
    unfinished = f", {summary.num_unfinished} unfinished" if summary.num_unfinished else ""
    yield (
        f"requests  {summary.num_succeeded} done, {summary.num_failed} failed{unfinished} "
        f"in {summary.duration_s:.1f} s: {summary.requests_per_s:.2f} /s"
    )
    yield (
        f"tokens    {summary.output_tokens:,} out: {summary.output_tokens_per_s:.1f} /s; "
        f"with {summary.input_tokens:,} in: {summary.total_tokens_per_s:.1f} /s"
    )
    yield (
        f"goodput   {summary.goodput_requests_per_s:.2f} requests /s, {summary.goodput_share:.0%} of all, "
        f"within {_limits(result.limits)}"
    )
    if result.client_cpu_us_per_token is not None:
        yield f"client    {result.client_cpu_us_per_token:.0f} us CPU a token, {result.client_cpu_s:.2f} s in all"
    yield from failure_lines(result)
    for note in result.notes:
        yield f"note      {note}"
    if result.stopped_by is not None:
        yield f"PARTIAL   stopped by {result.stopped_by}: not every planned request was sent and ended"


def failure_lines(result: BenchResult) -> Iterator[str]:
    """How many requests failed in each way, with the first one's words."""
    for kind, count in result.summary.failures.items():
        yield f"failed    {count} x {kind}: {_first_message(result, kind)}"


def _limits(limits: GoodputLimits) -> str:
    return ", ".join(f"{name.upper()} {limit:g} s" for name, limit in limits.as_dict().items()) or "no limit"


def _first_message(result: BenchResult, kind: str) -> str:
    failures = (record.failure for run in result.runs for record in run.records)
    return next(failure.message for failure in failures if failure is not None and failure.kind == kind)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _figures(times: Distribution | None, *names: str) -> tuple[str, ...]:
    """Of a distribution in seconds, by name, in milliseconds."""
    if times is None:
        return (NOTHING,) * len(names)
    return tuple(f"{getattr(times, name) * 1000:,.1f}" for name in names)
