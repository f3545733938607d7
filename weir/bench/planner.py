"""Turns a workload into runs of requests whose bodies are written out before the first is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from weir.bench.exchange import Exchange
from weir.bench.interference import BURST, STEADY
from weir.bench.prompt_maker import PromptMaker
from weir.bench.request_plan import Endpoint, Sampling, plan_request
from weir.bench.workload import Burst, Workload, poisson_arrivals

MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that share a clock. Their pace: `concurrency` at a time, or each when it is due.

    Attributes:
        burst: begin once every one of `exchanges`, all begun together, has had its awaited pieces of text.
    """

    name: str
    exchanges: Sequence[Exchange]
    concurrency: int | None = None
    request_rate: float | None = None
    burst: Sequence[Exchange] = ()


class Planner:
    """Plans every run of a workload. Lengths and arrivals follow the seed, texts the salt of the prompts."""

    def __init__(
        self, workload: Workload, prompts: PromptMaker, *, model: str, endpoint: Endpoint, sampling: Sampling
    ) -> None:
        self._workload = workload
        self._prompts = prompts
        self._sampling = sampling
        self._plan = partial(plan_request, model=model, endpoint=endpoint, sampling=sampling)

    async def plan_warmups(self, count: int) -> list[Exchange]:
        """Requests of the workload's own size that share nothing with it."""
        planned: list[Exchange] = []
        lengths = self._workload.draw_lengths(self._sampling.seed)
        for index in range(count):
            input_tokens, output_tokens = lengths[index % len(lengths)]
            prompt = await self._prompts.make(self._workload.shared_prefix_tokens + input_tokens)
            planned.append(Exchange(self._plan(prompt, output_tokens=output_tokens, index=index)))
        return planned

    async def plan_runs(self) -> list[Run]:
        """In the order in which they are to be driven."""
        workload = self._workload
        if workload.burst is not None:
            alone = Run(name="alone", exchanges=await self._plan_requests(kind=STEADY))
            steady = await self._plan_requests(kind=STEADY, awaited_chunks=workload.burst.after_chunks)
            return [alone, Run(name="burst", exchanges=steady, burst=await self._plan_burst(workload.burst))]
        if workload.concurrency is not None:
            return [Run(name=MAIN, exchanges=await self._plan_requests(), concurrency=workload.concurrency)]
        return [
            Run(name=f"rate={rate:g}", exchanges=await self._plan_requests(rate=rate), request_rate=rate)
            for rate in workload.request_rates
        ]

    async def _plan_requests(
        self, *, kind: str = MAIN, rate: float = math.inf, awaited_chunks: int = 0
    ) -> list[Exchange]:
        workload, seed = self._workload, self._sampling.seed
        await self._prompts.share_prefix(workload.shared_prefix_tokens)
        arrivals = poisson_arrivals(rate, workload.num_requests, seed)
        planned: list[Exchange] = []
        for index, (input_tokens, output_tokens) in enumerate(workload.draw_lengths(seed)):
            prompt = await self._prompts.make(input_tokens)
            plan = self._plan(prompt, output_tokens=output_tokens, kind=kind, index=index, due_s=arrivals[index])
            planned.append(Exchange(plan, awaited_chunks=awaited_chunks))
        return planned

    async def _plan_burst(self, burst: Burst) -> list[Exchange]:
        await self._prompts.share_prefix(0)
        planned: list[Exchange] = []
        for index in range(burst.num_requests):
            prompt = await self._prompts.make(burst.input_tokens)
            planned.append(Exchange(self._plan(prompt, output_tokens=burst.output_tokens, kind=BURST, index=index)))
        return planned
