"""One measurement from the first question to the last figure. The one place that says what a benchmark is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from weir.bench.corpus import Corpus
from weir.bench.exchange import Exchange, Exchanger
from weir.bench.interference import measure_interference
from weir.bench.load import Perform, burst_among, closed_loop, open_loop
from weir.bench.metrics import GoodputLimits, summarize
from weir.bench.notes import notes_on
from weir.bench.planner import Planner, Run
from weir.bench.prompt_maker import PromptKind, PromptMaker
from weir.bench.request_plan import Endpoint, Sampling
from weir.bench.result import BenchResult, RunResult
from weir.bench.server_address import ServerAddress, ServerQuestions
from weir.bench.token_codec import ServerCodec, TokenCodec
from weir.bench.workload import Workload
from weir.core.deadline import Clock, Deadline
from weir.core.errors import UnavailableError

INTERRUPT = "interrupt"
MAX_DURATION = "max_duration"


class Watcher(Protocol):
    """Is told how far the measurement is."""

    def run_begins(self, name: str, num_requests: int) -> None:
        """A run of so many requests begins."""

    def request_ended(self, exchange: Exchange) -> None:
        """One of them ended, well or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What is measured, and how.

    Attributes:
        salt: of the prompts' text; see `PromptMaker`.
        codec: None takes the server's own tokenizer.
        model: None takes the server's first.
        num_warmups: requests before the measurement, one after the other; the first that fails ends it.
        max_duration_s: no request begins later than this; those that run then go on to their end.
        timeout_s: of one request.
    """

    address: ServerAddress
    workload: Workload
    corpus: Corpus
    salt: str
    codec: TokenCodec | None = None
    model: str | None = None
    endpoint: Endpoint = Endpoint.COMPLETIONS
    prompt_kind: PromptKind = PromptKind.TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    limits: GoodputLimits = field(default_factory=GoodputLimits)
    num_warmups: int = 1
    max_duration_s: float = math.inf
    timeout_s: float = 600.0


async def run_benchmark(benchmark: Benchmark, watcher: Watcher, *, clock: Clock = time.perf_counter) -> BenchResult:
    """Measure. A cancellation (Ctrl-C) of a run ends it, and the result is what is known by then.

    Raises:
        UnavailableError: no server answers, or a warm-up failed.
        ConfigError: there is no tokenizer, or no text of the lengths asked for.
    """
    async with ServerQuestions(benchmark.address) as questions:
        model = await questions.find_model(benchmark.model)
        server = await questions.server_name()
        planner = Planner(
            benchmark.workload,
            PromptMaker(
                benchmark.codec or await ServerCodec.find(questions, model),
                benchmark.corpus,
                salt=benchmark.salt,
                kind=benchmark.prompt_kind,
                add_special_tokens=benchmark.endpoint is Endpoint.COMPLETIONS,
            ),
            model=model,
            endpoint=benchmark.endpoint,
            sampling=benchmark.sampling,
        )
        warmups = await planner.plan_warmups(benchmark.num_warmups)
        runs = await planner.plan_runs()
    exchanger = Exchanger(benchmark.address, benchmark.endpoint, timeout_s=benchmark.timeout_s, clock=clock)
    await _warm_up(exchanger, warmups)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    cpu_s = time.process_time()
    results, stopped_by = await _drive_all(runs, exchanger, benchmark, watcher, clock)
    cpu_s = time.process_time() - cpu_s
    records = [record for result in results for record in result.records]
    workload, limits = benchmark.workload, benchmark.limits
    interference = None
    if workload.burst is not None:
        alone, disturbed = (results[index].records if index < len(results) else () for index in range(2))
        interference = measure_interference(alone, disturbed, limits)
    return BenchResult(
        workload=workload,
        model=model,
        server=server,
        stopped_by=stopped_by,
        started_at=started_at,
        limits=limits,
        summary=summarize(records, limits, duration_s=sum(result.summary.duration_s for result in results)),
        runs=results,
        interference=interference,
        client_cpu_s=cpu_s,
        notes=tuple(notes_on(records, workload, interference, ignore_eos=benchmark.sampling.ignore_eos)),
    )


async def _warm_up(exchanger: Exchanger, warmups: Sequence[Exchange]) -> None:
    for warmup in warmups:
        await exchanger.perform(warmup)
        if warmup.failure is not None:
            raise UnavailableError(f"the warm-up failed ({warmup.failure.kind}): {warmup.failure.message}")


async def _drive_all(
    runs: Sequence[Run], exchanger: Exchanger, benchmark: Benchmark, watcher: Watcher, clock: Clock
) -> tuple[list[RunResult], str | None]:
    """The runs that were begun, and what ended them early, if anything did."""
    until = Deadline.after(benchmark.max_duration_s, clock)
    results: list[RunResult] = []
    is_interrupted = False

    async def perform(exchange: Exchange) -> None:
        await exchanger.perform(exchange)
        watcher.request_ended(exchange)

    for run in runs:
        if until.is_past(clock):
            break
        watcher.run_begins(run.name, len(run.exchanges) + len(run.burst))
        started_s = clock()
        try:
            await _drive(run, perform, until, clock)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # the result is what the caller still wants
            is_interrupted = True
        results.append(_result_of(run, started_s, clock(), benchmark.limits))
        if is_interrupted:
            break
    num_begun = sum(len(result.records) for result in results)
    num_planned = sum(len(run.exchanges) + len(run.burst) for run in runs)
    stopped_by = INTERRUPT if is_interrupted else MAX_DURATION if num_begun < num_planned else None
    return results, stopped_by


async def _drive(run: Run, perform: Perform, until: Deadline, clock: Clock) -> None:
    if run.burst:
        await burst_among(run.exchanges, run.burst, perform, until=until, clock=clock)
    elif run.concurrency is not None:
        await closed_loop(run.exchanges, perform, concurrency=run.concurrency, until=until, clock=clock)
    else:
        await open_loop(run.exchanges, perform, until=until, clock=clock)


def _result_of(run: Run, started_s: float, now_s: float, limits: GoodputLimits) -> RunResult:
    found = (exchange.record(run.name, started_s, now_s) for exchange in (*run.exchanges, *run.burst))
    records = [record for record in found if record is not None]
    return RunResult(
        name=run.name,
        request_rate=run.request_rate,
        summary=summarize(records, limits),
        records=records,
    )
